"""Transfer of training state between replica groups, and catching up while training."""
