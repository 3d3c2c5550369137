"""One training step: the quorum before it, its collectives, its vote."""
