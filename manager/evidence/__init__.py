"""Collects evidence of a hang: what the ranks' processes are doing, seen from inside and from outside."""
