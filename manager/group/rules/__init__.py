"""The rules of a replica group. No I/O, no clock."""
