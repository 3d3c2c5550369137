"""What the benchmarks share: processes, load, numbers."""
