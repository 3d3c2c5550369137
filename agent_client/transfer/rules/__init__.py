"""Rules of a transfer: which source sends which pieces. No I/O, no clock."""
