"""Rules of in-process restart: the machine of a rank, and its events and effects. No I/O and no clock."""
