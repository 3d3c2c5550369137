"""The lighthouse daemon: its configuration, listeners, RPC services and metrics."""
