"""Addresses, binds and bounded queues."""
