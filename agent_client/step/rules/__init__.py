"""Rules of a training step. No I/O, no clock."""
