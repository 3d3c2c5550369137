"""Exit statuses, commands and output. No I/O."""
