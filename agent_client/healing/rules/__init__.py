"""Rules of healing: which source sends which piece, and how a rank catches up. No I/O, no clock."""
