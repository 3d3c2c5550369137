"""Live training state, from a replica group that is ahead to one that heals: over HTTP, no shared disk."""
