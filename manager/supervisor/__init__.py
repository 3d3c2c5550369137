"""The supervisor: starts, watches and restarts the ranks of a group on all its hosts."""
