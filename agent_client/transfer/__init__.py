"""Transfer of live training state over HTTP, from groups that are ahead to a group that heals. No shared disk."""
