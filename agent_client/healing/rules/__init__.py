"""How a group catches up. No I/O, no clock."""
