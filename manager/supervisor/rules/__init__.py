"""Rules for supervising ranks: on which host each runs, and when they restart. They do no I/O and read no clock."""
