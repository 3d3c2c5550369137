"""Who comes while the others take inner steps of their own is in their next outer step, and nobody asks for it.

A simulated job whose ranks call their managers once a minute, as DiLoCo's script does in each outer step.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lighthouse.job.records import QuorumConfig
from lighthouse_protocol.messages.membership import World as JobSize
from lighthouse_protocol.messages.session import QuorumOrder
from tests.simulation.quorums.plan import draw_plan
from tests.simulation.quorums.simulation import QuorumSimulation
from tests.simulation.world import World

OUTER_STEP_S = 60.0
CALM = ("faults_s", "breaks", "skips", "closes", "pause", "catch_up", "step_spread", "from_checkpoint", "wants_next")
TIMEOUTS = ("quorum_timeout_s", "vote_timeout_s", "collective_timeout_s", "heal_timeout_s")
PLAN = {
    **dict.fromkeys(CALM, 0.0),
    **dict.fromkeys(TIMEOUTS, 1000.0),
    "step_s": OUTER_STEP_S,
    "group_world_size": 1,
    "torchft": 0,
}
USUAL = ("Heartbeat", "HeartbeatAck", "World")


class Job:
    def __init__(self) -> None:
        plan = replace(draw_plan(1, groups=2, scenario="storm"), config=QuorumConfig(), **PLAN)
        self.simulation = QuorumSimulation(plan)
        self.size = JobSize(0, 0)  # as the managers were told last
        self._said: Counter[tuple[str, str]] = Counter()
        self.simulation.lighthouse.start()
        for group in self.simulation.groups:
            group.start()

    def note(self, who: str, to: str, message: Any) -> None:
        """Count what goes between a manager and the lighthouse, either way."""
        if "lighthouse" in who + to:
            kind = message.phase if isinstance(message, QuorumOrder) else type(message).__name__
            self._said[(who if "lighthouse" in to else to).partition(".")[0], kind] += 1
        self.size = message if isinstance(message, JobSize) else self.size

    def told(self, until: float) -> list[dict[str, int]]:
        """Return what went between a, b and the lighthouse until then, except heartbeats and the size of the job."""
        self._said.clear()
        since = self.simulation.world.now
        self.simulation.world.run(until)
        assert all(count < 1.2 * (until - since) for (_, kind), count in self._said.items() if kind == "Heartbeat")
        news = {(who, kind): n for (who, kind), n in self._said.items() if kind not in USUAL}
        return [{kind: n for (who, kind), n in news.items() if who == name} for name in "ab"]


def test_a_newcomer_is_in_the_next_outer_step_and_without_one_nothing_is_said(monkeypatch: pytest.MonkeyPatch):
    job = Job()
    monkeypatch.setattr(World, "on_send", job.note)
    job.told(0.5 * OUTER_STEP_S)
    assert job.told(4.5 * OUTER_STEP_S) == [{}, {}]
    ranks = [group.ranks[0] for group in job.simulation.groups]
    assert [rank.commits for rank in ranks] == [4, 4]
    assert job.size.peers_pending == 0

    newcomer = job.simulation.add_stranger()
    assert job.told(4.9 * OUTER_STEP_S) == [{"recalled": 1, "resumed": 1}] * 2
    assert job.size.pending == (newcomer.replica_id,)
    assert newcomer.ranks[0].quorum_id == 0, "it waits, and nobody is disturbed"

    assert job.told(5.5 * OUTER_STEP_S) == [{"JoinRequest": 1, "QuorumChanged": 1}] * 2
    ranks.append(newcomer.ranks[0])
    assert {rank.quorum_id for rank in ranks} == {job.simulation.checkers.newest_id}
    assert [rank.discards for rank in ranks] == [0, 0, 0]
    assert job.size.peers_pending == 0
