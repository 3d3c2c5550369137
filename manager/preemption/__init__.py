"""Watches for notices that this host will be taken away, and makes the group drain before that happens."""
