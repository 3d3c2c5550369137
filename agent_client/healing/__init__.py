"""Transfer of training state over HTTP to a healing group, which can catch up while training. Needs no shared disk."""
