"""The manager daemon: its configuration, its RPC service and its metrics."""
