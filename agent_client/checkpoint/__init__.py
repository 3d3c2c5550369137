"""Live training state, from a replica group that is ahead to one that heals: no pickle, no shared disk."""
