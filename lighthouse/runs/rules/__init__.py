"""The rules of restarts. No I/O, no clock."""
