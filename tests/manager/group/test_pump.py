"""Who comes while the others take inner steps of their own is in their next outer step, and nobody asks for it.

The machines of a lighthouse and its managers, message by message: DiLoCo's script calls its manager once an outer step.
"""

from collections import Counter

from lighthouse.members.rules.rank_grid import grid_of
from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.events import (
    HeartbeatAnswered,
    Joined,
    Ordered,
    QuorumFormed,
    SessionHeartbeatReceived,
    SessionOpened,
    Welcomed,
)
from lighthouse.quorum.world_broadcast import world_of
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import (
    Heartbeat,
    HeartbeatAck,
    Hello,
    JoinAccepted,
    JoinRequest,
    ToLighthouse,
    ToManager,
)
from manager.group.rules.events import QuorumAnswered, Received, Sent, WatchOpened
from manager.group.rules.events import SessionOpened as Connected
from manager.group.rules.machine import GroupMachine
from tests.lighthouse.builders import AnswersOnly
from tests.manager.builders import ask
from tests.manager.groups import vote

OUTER_STEP_S = 300


class Job:
    """What is said is heard at once. `said` counts what goes either way, by its kind, but for beats and echoes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lighthouse = AnswersOnly(QuorumConfig())
        self.groups: dict[str, GroupMachine] = {}
        self.said: Counter[tuple[str, str]] = Counter()
        self.beats: Counter[str] = Counter()
        self.answers: dict[str, tuple[str, ...]] = {}
        self._joins: dict[int, tuple[str, int]] = {}

    def come(self, name: str) -> None:
        self.groups[name] = GroupMachine(Participant(name, address=f"{name}:1", store_address=f"{name}:2"), "L")
        self.feed(name, Connected())
        self.feed(name, WatchOpened(1, 0, "w0"))

    def feed(self, name: str, event: object) -> None:
        self._perform(name, self.groups[name].handle(event, self.now))  # type: ignore[arg-type]

    def outer_step(self, step: int) -> None:
        """Of all that take part: each asks, and when all are answered, all vote."""
        self.answers = {}
        for name in sorted(self.groups):
            self.feed(name, ask(step * 10, 0, step, deadline_at=self.now + 60, tag_quorum_id=0))

    def commit(self, step: int, quorum_id: int) -> None:
        for name in sorted(self.groups):
            self.feed(name, vote(step * 10 + 1, 0, step, quorum_id=quorum_id))

    def wait(self, seconds: int) -> None:
        """The ranks compute; daemons beat."""
        for _ in range(seconds):
            self.now += 1
            for name in sorted(self.groups):
                self._perform(name, self.groups[name].tick(self.now))
            self._tell(self.lighthouse.tick(self.now))

    def _perform(self, name: str, effects: object) -> None:
        for effect in effects:  # type: ignore[attr-defined]
            match effect:
                case Sent(message):
                    self._say(name, message)
                case QuorumAnswered(_, assignment):
                    self.answers[name] = assignment.replica_ids
                case _:
                    pass

    def _say(self, name: str, message: ToLighthouse) -> None:
        session = sorted(self.groups).index(name)
        if isinstance(message, Heartbeat):
            self.beats[name] += 1
        else:
            self.said[name, type(message).__name__] += 1
        match message:
            case Hello():
                event: object = SessionOpened(session, message)
            case Heartbeat():
                event = SessionHeartbeatReceived(session, message)
            case JoinRequest(number, participant, time_left_s):
                call = len(self._joins)
                self._joins[call] = name, number
                event = Joined(call, participant, self.now + time_left_s, session)
            case _:
                raise AssertionError(f"nobody says {message} here")
        self._tell(self.lighthouse.handle(event, self.now))  # type: ignore[arg-type]

    def _tell(self, effects: object) -> None:
        for effect in effects:  # type: ignore[attr-defined]
            match effect:
                case Welcomed(session, welcome):
                    self._hear(session, welcome)
                case HeartbeatAnswered(session, number, order):
                    self._hear(session, HeartbeatAck(number, 1.0, order))
                case Ordered(order, sessions):
                    for session in sessions:
                        self._hear(session, order)
                case QuorumFormed(quorum, calls, _, stands):
                    for call in calls:
                        name, number = self._joins[call]
                        self._hear(sorted(self.groups).index(name), JoinAccepted(number, quorum, stands))
                case _:
                    raise AssertionError(f"nobody does {effect} here")

    def _hear(self, session: int, message: ToManager) -> None:
        name = sorted(self.groups)[session]
        if not isinstance(message, HeartbeatAck):
            self.said[name, getattr(message, "phase", type(message).__name__)] += 1
        self.feed(name, Received(message))


def test_a_newcomer_waits_for_the_next_outer_step_and_no_longer():
    job = Job()
    for name in "ab":
        job.come(name)
    job.outer_step(0)
    assert job.answers == {"a": ("a", "b"), "b": ("a", "b")}
    job.commit(0, quorum_id=1)
    job.wait(OUTER_STEP_S // 2)
    assert job.lighthouse.peers_pending == 0
    job.said.clear()
    job.beats.clear()

    job.come("c")
    job.feed("c", ask(1, 0, 0, deadline_at=job.now + 600, tag_quorum_id=0))
    assert world_of(job.lighthouse, grid_of(job.lighthouse.roster)).pending == ("c",)
    job.wait(OUTER_STEP_S // 2)
    for name in "ab":
        assert {kind: n for (who, kind), n in job.said.items() if who == name} == {"recalled": 1, "resumed": 1}
        assert job.beats[name] == OUTER_STEP_S // 2 + 1, "one beat more, which says how far it is"
    assert "c" not in job.answers, "it waits, and nobody is disturbed"

    job.said.clear()
    for name in "ab":
        job.feed(name, ask(11, 0, 1, deadline_at=job.now + 60, tag_quorum_id=1))
    assert job.answers["a"] == job.answers["b"] == job.answers["c"] == ("a", "b", "c")
    assert {key: n for key, n in job.said.items() if key[0] in "ab"} == {
        (name, kind): 1 for name in "ab" for kind in ("JoinRequest", "JoinAccepted")
    }
    assert world_of(job.lighthouse, grid_of(job.lighthouse.roster)).peers_pending == 0


def test_while_nobody_comes_an_outer_step_says_nothing_to_the_lighthouse():
    job = Job()
    for name in "ab":
        job.come(name)
    job.outer_step(0)
    job.commit(0, quorum_id=1)
    job.said.clear()
    for step in range(1, 5):
        job.wait(OUTER_STEP_S)
        job.outer_step(step)
        job.commit(step, quorum_id=1)
    assert job.answers == {"a": ("a", "b"), "b": ("a", "b")}
    assert job.said == {}
