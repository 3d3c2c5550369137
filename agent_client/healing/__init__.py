"""Giving and taking state, and catching up beside steps."""
