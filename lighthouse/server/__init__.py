"""The daemon, its RPCs, its configuration."""
