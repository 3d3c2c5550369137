"""The services of torchft."""
