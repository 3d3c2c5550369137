"""Rules of in-process restart: a rank's state machine, and its events and effects. No I/O and no clock."""
