"""Each way to train, through each thing that can happen to a group: after every committed step all groups hold the
same bits of weights and of optimizer state, nobody dies but the victims, and training goes on with all that live.
"""

import pytest

from tests.agent_client.matrix_events import EVENTS, Cell, Event, finish, kill_and_heal, kill_rank_0
from tests.agent_client.training_jobs import MakeJob
from tests.agent_client.training_kinds import WAYS
from tests.processes import Lighthouse

# How long a group is waited for that has nothing to say.
TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")

QUICK = {("streamed", kill_and_heal), ("hsdp", kill_and_heal), *(("ddp", event) for event in EVENTS)}


@pytest.mark.parametrize(
    ("way", "event"),
    [
        pytest.param(way, event, marks=[] if (way, event) in QUICK else pytest.mark.slow, id=f"{way}-{event.__name__}")
        for way in WAYS
        for event in EVENTS
    ],
)
def test_all_groups_hold_the_same_bits(way: str, event: Event, make_job: MakeJob, lighthouse: Lighthouse) -> None:
    ranks = 2 if event is kill_rank_0 else WAYS[way].ranks
    cell = Cell(way, make_job(WAYS[way], ranks=ranks, ballast=True))
    finish(cell, event(cell))
    assert lighthouse.is_alive
