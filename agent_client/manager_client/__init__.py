"""This rank's requests, votes and watch at its manager."""
