"""Transfer of training state over HTTP to a group that heals, and catching up while training. No shared disk."""
