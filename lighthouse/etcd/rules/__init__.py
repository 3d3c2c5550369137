"""Pure: see candidate.py."""
