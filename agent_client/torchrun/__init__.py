"""Rendezvous backend of torchrun: the lighthouse decides which nodes train together and reports losses immediately."""
