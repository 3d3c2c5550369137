"""The rules of in-process restart. No I/O, no clock."""
