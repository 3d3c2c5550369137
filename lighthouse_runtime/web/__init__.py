"""HTTP server: metrics, health, status feed and control."""
