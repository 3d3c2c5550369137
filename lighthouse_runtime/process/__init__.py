"""Process-level infrastructure: entry points, event loop, logging, child processes and files."""
