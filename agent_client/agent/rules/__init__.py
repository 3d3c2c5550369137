"""The rules of a step. No I/O, no clock."""
