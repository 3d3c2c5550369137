"""Addresses and bounded send queues."""
