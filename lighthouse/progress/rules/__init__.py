"""What progress amounts to. No I/O, no clock."""
