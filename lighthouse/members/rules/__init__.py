"""Which groups are there. No I/O, no clock."""
