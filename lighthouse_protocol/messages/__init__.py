"""The messages that daemons and ranks exchange, as frozen dataclasses."""
