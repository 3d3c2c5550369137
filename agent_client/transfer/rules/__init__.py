"""Which source is asked next. No I/O, no clock."""
