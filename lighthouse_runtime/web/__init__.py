"""HTTP: metrics, health, the status feed, control."""
