"""Common parts of the benchmarks: processes, load, and statistics."""
