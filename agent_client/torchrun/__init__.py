"""Rendezvous backend for torchrun. The lighthouse decides which nodes train together, and detects losses."""
