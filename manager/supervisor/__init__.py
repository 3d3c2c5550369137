"""The supervisor: starts, watches and restarts the ranks in a group on all of its hosts."""
