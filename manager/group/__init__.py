"""Ranks, grants and votes of a replica group, and its session with the lighthouse."""
