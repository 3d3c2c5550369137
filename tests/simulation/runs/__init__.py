"""Runs, their ranks, supervisors and lighthouse on a virtual clock: docs/contributing/simulation.md."""
