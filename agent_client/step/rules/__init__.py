"""Rules of a training step. No I/O and no clock."""
