"""Rules of in-process restart, without I/O and without a clock: a rank's state machine, events and effects."""
