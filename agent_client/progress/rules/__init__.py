"""Counting phases and collectives. No I/O, no clock."""
