"""What the lighthouse must not forget, in SQLite; one process at a time."""
