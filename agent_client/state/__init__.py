"""What the state of a training process is, and its bytes: no pickle."""
