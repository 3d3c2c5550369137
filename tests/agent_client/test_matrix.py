"""Each way to train, through each thing that can happen to a group: after every committed step all groups hold the
same bits of weights and of optimizer state, nobody dies but the victims, and training goes on with all that live.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.agent_client.matrix_events import EVENTS, Cell, Event, finish, kill_rank_0
from tests.agent_client.matrix_training import WAYS
from tests.agent_client.ranks import RankServer
from tests.agent_client.training_jobs import TrainingJob
from tests.processes import Lighthouse

# How long a group is waited for that has nothing to say.
TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
ACTOR = "tests.agent_client.matrix_training:MatrixActor"


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == "ddp" else pytest.mark.slow) for way in WAYS])
def test_all_groups_hold_the_same_bits(
    way: str, event: Event, lighthouse: Lighthouse, store: str, rank_server: RankServer, tmp_path: Path
) -> None:
    ranks = 2 if way == "hsdp" or event is kill_rank_0 else 1
    with ExitStack() as stack:
        job = TrainingJob(lighthouse.address, store, rank_server, tmp_path, stack, actor=ACTOR, way=way, ranks=ranks)
        cell = Cell(way, ranks, job)
        finish(cell, event(cell))
        assert lighthouse.is_alive
