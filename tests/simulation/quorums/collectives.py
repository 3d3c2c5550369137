"""All-reduces over the participants of (quorum_id, step), per group rank: they complete, fail, are aborted, or wait.

A participant drops its process group when it aborts, dies, or enters another quorum. That fails the unfinished
collectives of the others. Once all have arrived, each participant completes in its own time. A drop in between fails
some of them and spares others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.network import Network
from tests.simulation.world import Process, Violation, World

POLL_S = 0.05
IGNORED_DROP = 0.5
LATE_SHARE, LATE_S = 0.02, 0.08  # of those that take part, and what it takes them to learn the sum


@dataclass(slots=True)
class Arrival:
    """A participant of a collective.

    `done` receives whether the collective completed, and the sum. A `state` of None contributes nothing.
    """

    process: Process
    state: int | None
    contributors: int
    done: Callable[[bool, int], None]
    is_over: bool = False


@dataclass(slots=True)
class _Collective:
    step: int
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    total: int | None = None


@dataclass(slots=True)
class _Meeting:
    participants: tuple[str, ...]
    dropped: set[str] = field(default_factory=set)
    open: dict[int, _Collective] = field(default_factory=dict)

    def close(self, step: int) -> None:
        self.open.pop(step, None)


class Collectives:
    def __init__(self, world: World, network: Network) -> None:
        self._world = world
        self._network = network
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        self.completed: dict[tuple[int, int, int], tuple[str, ...]] = {}

    def enter(self, quorum_id: int, group_rank: int, participants: tuple[str, ...]) -> None:
        self._meetings.setdefault((quorum_id, group_rank), _Meeting(participants))

    def drop(self, quorum_id: int, group_rank: int, name: str) -> None:
        """End the process group of `name` in that quorum."""
        meeting = self._meetings.get((quorum_id, group_rank))
        if meeting is None or name in meeting.dropped:
            return
        meeting.dropped.add(name)
        for collective in list(meeting.open.values()):
            for other, arrival in list(collective.arrivals.items()):
                is_spared = collective.total is not None and self._world.random.random() < IGNORED_DROP
                if other == name or not is_spared:
                    self._fail(arrival, self._network.delay_s() if other != name else 0.0)

    def arrive(self, quorum_id: int, group_rank: int, step: int, arrival: Arrival, name: str) -> None:
        meeting = self._meetings[quorum_id, group_rank]
        if meeting.dropped:
            return self._fail(arrival, self._network.delay_s())
        collective = meeting.open.setdefault(step, _Collective(step))
        if name in collective.arrivals:
            raise Violation(f"S4 {name} takes part twice in step {step} of quorum {quorum_id}")
        collective.arrivals[name] = arrival
        if len(collective.arrivals) == len(meeting.participants):
            self._complete(quorum_id, group_rank, meeting, collective)
        return None

    def _complete(self, quorum_id: int, group_rank: int, meeting: _Meeting, collective: _Collective) -> None:
        if meeting.dropped:
            return None
        if not self._is_connected(collective):
            return self._world.after(POLL_S, self._complete, quorum_id, group_rank, meeting, collective)
        collective.total = self._sum(quorum_id, collective)
        self.completed[quorum_id, collective.step, group_rank] = meeting.participants
        slowest = max(self._network.delay_s() for _ in collective.arrivals)
        for arrival in collective.arrivals.values():
            takes_s = slowest * self._world.random.uniform(1, 2)
            if self._world.random.random() < LATE_SHARE:
                takes_s += LATE_S
            arrival.process.after(takes_s, self._reduced, arrival, collective.total)
        self._world.after(3 * slowest + LATE_S, meeting.close, collective.step)
        return None

    def _is_connected(self, collective: _Collective) -> bool:
        processes = [arrival.process for arrival in collective.arrivals.values()]
        if any(process.held_until > self._world.now for process in processes):
            return False
        hosts = {process.host for process in processes}
        return not any(self._network.is_cut(a, b) for a in hosts for b in hosts)

    def _sum(self, quorum_id: int, collective: _Collective) -> int:
        arrivals = collective.arrivals
        contributing = {name: a.state for name, a in arrivals.items() if a.state is not None}
        where = f"step {collective.step} of quorum {quorum_id}"
        if len(set(contributing.values())) > 1:
            raise Violation(f"S3 {where}: participants with different states train together: {contributing}")
        divisors = {name: a.contributors for name, a in arrivals.items()}
        if set(divisors.values()) != {len(contributing)}:
            raise Violation(f"S3 {where}: {len(contributing)} contribute, the sum is divided by {divisors}")
        return hash((quorum_id, collective.step, *sorted((hash_of(name), s) for name, s in contributing.items())))

    def _reduced(self, arrival: Arrival, total: int) -> None:
        if not arrival.is_over:
            arrival.is_over = True
            arrival.done(True, total)

    def _fail(self, arrival: Arrival, delay_s: float) -> None:
        if not arrival.is_over:
            arrival.is_over = True
            arrival.process.after(delay_s, arrival.done, False, 0)


def hash_of(name: str) -> int:
    """Return a hash that is the same in every process, unlike hash()."""
    return int.from_bytes(name.encode()[:8].ljust(8, b"\0"), "big")
