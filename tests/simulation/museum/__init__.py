"""Planted defects, each with the checker that finds it. `python -m tests.simulation.museum` measures how soon."""
