"""The rules of the quorum. No I/O, no clock."""
