"""Stalls and losses: evidence, policy, archive, files."""
