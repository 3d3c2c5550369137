"""Real processes, drawn faults, and what the logs say afterwards."""
