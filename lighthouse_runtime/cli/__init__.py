"""Settings to options and environment variables; durations; the terminal."""
