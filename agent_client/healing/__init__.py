"""Copies the training state to a healing group over HTTP, without a shared disk. A group can also heal in parallel."""
