"""Rules of supervision: when ranks restart and how they are laid out. No I/O, no clock."""
