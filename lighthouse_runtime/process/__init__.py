"""The process: entry points, event loop, logs, children and files."""
