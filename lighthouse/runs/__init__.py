"""Restarts: generations, ranks, supervisors, spares, keys."""
