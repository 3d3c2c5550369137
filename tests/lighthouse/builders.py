"""Short words for what goes into the lighthouse's machine and what comes out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lighthouse.job.events import (
    ConnectionsCut,
    GridChanged,
    HeartbeatReceived,
    Joined,
    JoinRefused,
    MemberEffect,
    NewcomersChanged,
    QuorumEffect,
    QuorumEvent,
    QuorumFormed,
)
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.progress import GroupRanks, grid_of
from lighthouse.job.records import QuorumConfig
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.refusals import LighthouseError
from tests.lighthouse.recount import recount
from tests.refusals import Refused

FAR = 1e6
"""A deadline that no test comes near."""


def group(replica_id: str, step: int = 0, incarnation: str = "i1", **fields: object) -> Participant:
    """A replica group with routable addresses of its own."""
    defaults = {"address": f"{replica_id}.example:29512", "store_address": f"{replica_id}.example:29600"}
    return Participant(replica_id, incarnation=incarnation, step=step, **(defaults | fields))


def on_loopback(replica_id: str, step: int = 0, **fields: object) -> Participant:
    return group(replica_id, step, address="127.0.0.1:29512", store_address="127.0.0.1:29600", **fields)


def join(call: int, who: Participant | str, deadline_at: float = FAR, **fields: object) -> Joined:
    return Joined(call, group(who, **fields) if isinstance(who, str) else replace(who, **fields), deadline_at)


def beat(replica_id: str, incarnation: str = "i1") -> HeartbeatReceived:
    return HeartbeatReceived(replica_id, incarnation)


def formed(quorum_id: int, calls: tuple[int, ...], *participants: Participant, is_new: bool = True) -> QuorumFormed:
    return QuorumFormed(Quorum(quorum_id, participants), calls, is_new)


def refused(call: int, kind: type[LighthouseError], *words: str) -> Refused:
    return Refused((JoinRefused,), call, kind, words)


def answers(effects: Iterable[QuorumEffect]) -> list[QuorumEffect]:
    """Without what happens to members: for tests of whom the machine answers, and how."""
    return [
        effect
        for effect in effects
        if not isinstance(effect, MemberEffect | GridChanged | ConnectionsCut | NewcomersChanged)
    ]


class AnswersOnly(QuorumMachine):
    """The effects of `handle` and `tick` are its answers alone. After each event it is held to what always is so."""

    _grid: tuple[GroupRanks, ...] = ()

    def handle(self, event: QuorumEvent, now: float) -> Sequence[QuorumEffect]:
        effects = self._followed(super().handle(event, now))
        assert super().tick(now) == [], "a tick at the same moment finds nothing left to do"
        due = self.deadline(now)
        assert due is None or due > now
        recount(self, now)
        return effects

    def tick(self, now: float) -> Sequence[QuorumEffect]:
        return self._followed(super().tick(now))

    def _followed(self, effects: Sequence[QuorumEffect]) -> list[QuorumEffect]:
        grid = grid_of(self.job.groups.values()).groups
        assert GridChanged() in effects or grid == self._grid, "the world that is told is the one that is"
        self._grid = grid
        return answers(effects)


def machine(**config: object) -> QuorumMachine:
    return AnswersOnly(QuorumConfig(**config))


def beating(quorum_machine: QuorumMachine, names: str, start: float, stop: float) -> list[object]:
    """Everybody in `names` (one letter each) beats every second in [start, stop); the driver's ticks happen in time."""
    effects: list[object] = []
    now = start
    while now < stop:
        for name in names:
            effects += quorum_machine.handle(beat(name), now)
        effects += ticked(quorum_machine, now, min(now + 1, stop))
        now += 1
    return effects


def ticked(quorum_machine: QuorumMachine, now: float, until: float) -> list[object]:
    """What the machine says by itself in (now, until], woken at its own deadlines only."""
    effects: list[object] = []
    while (due := quorum_machine.deadline(now)) is not None and due <= until:
        assert due > now
        now = due
        effects += quorum_machine.tick(now)
    return effects


def training(names: str = "ab", now: float = 0.0, **config: object) -> QuorumMachine:
    """A machine whose groups `names` have formed quorum 1 at step 0 and are in their step; calls 1, 2, ... are used."""
    quorum_machine = machine(**config)
    for name in names:
        quorum_machine.handle(beat(name), now)
    for call, name in enumerate(names, start=1):
        quorum_machine.handle(join(call, name), now)
    assert quorum_machine.quorum is not None
    assert [p.replica_id for p in quorum_machine.quorum.participants] == sorted(names)
    return quorum_machine
