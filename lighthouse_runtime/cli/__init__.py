"""Command-line infrastructure: settings, durations and terminal output."""
