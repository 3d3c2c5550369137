"""A rendezvous backend of torchrun: the lighthouse decides which nodes train together, and tells a loss at once."""
