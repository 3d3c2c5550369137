"""Example scripts to read and run."""
