"""HTTP server: metrics, health checks, status feed, and actions by operators."""
