"""Scripts to read and to run."""
