"""Who is there. No I/O, no clock."""
