"""Faults: what can happen to a run, drawn from its seed as a list of (when, what, whom, for how long).

A fault kind is one function in this folder. Its decorator says to whom it can happen and how often it is drawn; its
docstring is its row in docs/contributing/simulation.md.
"""

from tests.simulation.quorums.faults import (
    clocks,
    groups,
    journal,
    lighthouse,
    managers,
    misfits,
    network,
    ranks,
    two_lighthouses,
)
from tests.simulation.quorums.faults.kinds import KINDS, Fault, draw_faults, draw_mix, schedule

__all__ = [
    "KINDS",
    "Fault",
    "clocks",
    "draw_faults",
    "draw_mix",
    "groups",
    "journal",
    "lighthouse",
    "managers",
    "misfits",
    "network",
    "ranks",
    "schedule",
    "two_lighthouses",
]
