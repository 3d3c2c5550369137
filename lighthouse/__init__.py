"""Coordinator of a training cluster: it decides which replica groups train together."""
