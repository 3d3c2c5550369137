"""The process: its loop, logs, and children."""
