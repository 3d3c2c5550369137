"""Rules of a training step, without I/O and without a clock."""
