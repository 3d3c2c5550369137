"""The kinds of faults of a cluster of replica groups: one function each, in the module of the place that it strikes."""

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
from tests.simulation.quorums.faults.kinds import KINDS, draw_faults, draw_mix

__all__ = [
    "KINDS",
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
    "two_lighthouses",
]
