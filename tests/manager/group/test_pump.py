"""Who comes while the others take inner steps of their own is in their next outer step, and nobody asks for it.

The machines of a lighthouse and its managers, message by message: DiLoCo's script calls its manager once an outer step.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from lighthouse.job import events
from lighthouse.job.driver import world_of
from lighthouse.job.progress import grid_of
from lighthouse.job.records import QuorumConfig
from lighthouse_protocol.messages.membership import Participant, World
from lighthouse_protocol.messages.session import Heartbeat, HeartbeatAck, Hello, JoinAccepted, JoinRequest
from manager.group.events import QuorumAnswered, Received, Sent, SessionOpened, WatchOpened
from manager.group.machine import GroupMachine
from tests.lighthouse.builders import AnswersOnly
from tests.manager.builders import ask
from tests.manager.groups import vote

OUTER_STEP_S = 60


class Job:
    """What is said is heard at once. `said` counts what goes either way, by its kind, without echoes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lighthouse = AnswersOnly(QuorumConfig())
        self.names: list[str] = []  # by their sessions
        self.groups: list[GroupMachine] = []
        self.said: Counter[tuple[str, str]] = Counter()
        self.answers: dict[str, tuple[str, ...]] = {}

    @property
    def world(self) -> World:
        return world_of(self.lighthouse, grid_of(self.lighthouse.job.groups.values()))

    def come(self, name: str) -> None:
        self.names.append(name)
        self.groups.append(GroupMachine(Participant(name, address=f"{name}:1", store_address=f"{name}:2"), "L"))
        self.feed(len(self.names) - 1, SessionOpened())
        self.feed(len(self.names) - 1, WatchOpened(1, 0, "w0"))

    def ask(self, session: int, step: int) -> None:
        self.feed(session, ask(step * 10, 0, step, deadline_at=self.now + 1000, tag_quorum_id=0))

    def outer_step(self, step: int) -> None:
        """Of all: each asks, and when all are answered, all vote."""
        self.answers = {}
        for session in range(len(self.groups)):
            self.ask(session, step)
        assert self.answers == dict.fromkeys(self.names, tuple(self.names))
        for session in range(len(self.groups)):
            self.feed(session, vote(step * 10 + 1, 0, step))

    def wait(self, seconds: int) -> None:
        """The ranks compute; daemons beat."""
        for _ in range(seconds):
            self.now += 1
            for session, group in enumerate(self.groups):
                self.perform(session, group.tick(self.now))
            self.tell(self.lighthouse.tick(self.now))

    def feed(self, session: int, event: Any) -> None:
        self.perform(session, self.groups[session].handle(event, self.now))

    def perform(self, session: int, effects: Iterable[object]) -> None:
        for effect in effects:
            match effect:
                case Sent(message):
                    self.said[self.names[session], type(message).__name__] += 1
                    self.tell(self.lighthouse.handle(self.heard(session, message), self.now))
                case QuorumAnswered(_, assignment):
                    self.answers[self.names[session]] = assignment.replica_ids
                case _:
                    pass

    def heard(self, session: int, message: object) -> Any:
        match message:
            case Hello():
                return events.SessionOpened(session, message)
            case Heartbeat():
                return events.SessionHeartbeatReceived(session, message)
            case JoinRequest(number, participant, time_left_s):
                return events.Joined(session * 100 + number, participant, self.now + time_left_s, session)
        raise AssertionError(f"nobody says {message} here")

    def tell(self, effects: Iterable[object]) -> None:
        for effect in effects:
            match effect:
                case events.HeartbeatAnswered(session, number, order):
                    self.feed(session, Received(HeartbeatAck(number, 1.0, order)))
                case events.Welcomed(session, welcome):
                    self.hear(session, welcome, "welcome")
                case events.Ordered(order, sessions):
                    for session in sessions:
                        self.hear(session, order, order.phase)
                case events.QuorumFormed(quorum, calls, _, stands):
                    for call in calls:
                        self.hear(call // 100, JoinAccepted(call % 100, quorum, stands), "quorum")
                case _:
                    raise AssertionError(f"nobody does {effect} here")

    def hear(self, session: int, message: Any, kind: str) -> None:
        self.said[self.names[session], kind] += 1
        self.feed(session, Received(message))

    def told(self) -> list[dict[str, int]]:
        """What went between a, b and the lighthouse since it was asked last."""
        counts = [{kind: n for (who, kind), n in self.said.items() if who == name} for name in "ab"]
        self.said.clear()
        return counts


def test_a_newcomer_is_in_the_next_outer_step_and_without_one_nothing_is_said():
    job = Job()
    for name in "ab":
        job.come(name)
    job.outer_step(0)
    job.wait(1)
    job.told()
    for step in (1, 2, 3):
        job.outer_step(step)
        job.wait(OUTER_STEP_S)
    assert job.told() == [{"Heartbeat": 3 * OUTER_STEP_S + 1}] * 2, "one at the first step under the quorum"
    assert job.world.peers_pending == 0

    job.come("c")
    job.ask(2, 0)
    assert job.world.pending == ("c",)
    job.wait(OUTER_STEP_S // 2)
    one_more = OUTER_STEP_S // 2 + 1  # which says how far it is
    assert job.told() == [{"recalled": 1, "resumed": 1, "Heartbeat": one_more}] * 2
    assert "c" not in job.answers, "it waits, and nobody is disturbed"

    job.ask(0, 4)
    job.ask(1, 4)
    assert job.answers == dict.fromkeys("abc", ("a", "b", "c"))
    assert [counts | {"Heartbeat": 0} for counts in job.told()] == [{"JoinRequest": 1, "quorum": 1, "Heartbeat": 0}] * 2
    assert job.world.peers_pending == 0
