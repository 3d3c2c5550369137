"""Rules of healing, without I/O and without a clock: which source sends which piece, and how a rank catches up."""
