"""Pure: no I/O, no clock."""
