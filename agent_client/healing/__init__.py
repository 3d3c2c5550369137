"""Copies the training state to a healing group over HTTP, without a shared disk, optionally while that group trains."""
