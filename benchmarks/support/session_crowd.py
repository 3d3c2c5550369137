"""Load generator: many managers in one process, with a connection each, that train in lockstep.

python -m benchmarks.support.session_crowd ADDRESS JOB [TIMEOUT_S]
"""

import asyncio
import math
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import uvloop

from benchmarks.support.children import allow_many_connections, answer_orders_async
from benchmarks.support.light_stream import Turns
from benchmarks.support.shared_session import (
    SharedQuorums,
    SharedReader,
    SharingClient,
    SharingRequests,
    SharingSession,
)
from lighthouse_protocol.coordinator import LeaderSearch, parse_coordinator
from lighthouse_protocol.limits import SECRET_BYTES
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import (
    GroupReport,
    Heartbeat,
    HeartbeatAck,
    JoinAccepted,
    JoinRejected,
    QuorumChanged,
    QuorumOrder,
    QuorumPhase,
    ToLighthouse,
    ToManager,
    Welcome,
)
from lighthouse_runtime.timing.timers import DeadlineTimer
from manager.group.events import QuorumRequest
from manager.group.link import LighthouseLink
from manager.group.records import ReplicaGroup
from manager.group.requests import LEASE_SHARE, Verdict, decide_request

CONNECTS_AT_ONCE = 50

Key = tuple[int, int]
"""(quorum_id, step)"""


@dataclass(slots=True)
class Tally:
    """Events since the last report."""

    beats: int = 0
    messages: int = 0  # to the lighthouse, without heartbeats
    commits: int = 0
    discards: int = 0
    revokes: int = 0
    longest_step_s: float = 0.0
    revoked_at: float = 0.0  # last revoke that a manager has received, by time.monotonic(); 0 without one
    steps_s: list[float] = field(default_factory=list[float])  # duration of each step


class LightManager:
    """Does the work of manager/group/machine.py and driver.py without ranks, calls and assignments.

    It opens no second connection when replies to heartbeats are late, since usually this crowded process is the cause.
    """

    def __init__(self, crowd: "Crowd", number: int) -> None:
        name = f"replica_group_{number}"
        host = f"127.{20 + number // 62_500}.{number // 250 % 250}.{number % 250 + 1}"  # all of 127 is this host
        self.quorum: Quorum | None = None
        self._crowd = crowd
        self._me = Participant(
            name, f"{time.time_ns():x}", address=f"{host}:29512", store_address=f"{host}:29513", watched=True
        )
        self._group = ReplicaGroup(self._me)
        self._requests = SharingRequests(self._group, crowd.quorums)
        self._session = SharingSession(secrets.token_hex(SECRET_BYTES), crowd.quorums)
        self._link = LighthouseLink(
            lambda: crowd.connect(host), LeaderSearch(parse_coordinator(crowd.address).addresses)
        )
        self._timer = DeadlineTimer(self._tick, asyncio.get_running_loop())
        self._clock = asyncio.get_running_loop().time
        self._step = self._tag = self._failures = 0
        self._handed: JoinAccepted | None = None
        self._waits = self._computes = self._was_welcomed = False
        self._running = asyncio.create_task(self._link.run(self._opened, self._received, self._closed))

    def start(self) -> None:
        """Request the quorum for the first step."""
        self._ask()
        self._flush()

    def die(self) -> None:
        self._running.cancel()
        self._timer.cancel()
        self._crowd.lockstep.leave(self)

    def complete(self) -> None:
        """Complete the collective of the current step, and commit it."""
        assert self.quorum is not None
        self._computes, self._failures = False, 0
        self._requests.record_committed_step(self.quorum.quorum_id, self._step)
        self._tag, self._step = self.quorum.quorum_id, self._step + 1
        self._crowd.tally.commits += 1
        self._ask()
        self._flush()

    # -- the lighthouse

    def _opened(self) -> None:
        self._send(self._session.open_session(self._participant(), self._report(), self._clock()))
        self._flush()

    def _closed(self, is_moving: bool) -> None:
        self._session.close_session()
        self._handed = None

    def _tick(self) -> None:
        if self._session.is_given_up(self._clock()):
            self._session.close_session()
            self._link.give_up("no echo")
        self._flush()

    def _received(self, message: ToManager) -> None:
        match message:
            case Welcome(_, _, order):
                self._session.handle_welcome(message, self._clock())
                if not self._was_welcomed:
                    self._was_welcomed = True
                    self._crowd.welcomed()
                self._apply_order(order)
            case HeartbeatAck(_, _, order):
                sent_at = self._session.handle_ack(message, self._clock())
                self._apply_order(order)
                if sent_at is not None:
                    self._requests.renew_lease(sent_at + LEASE_SHARE * self._session.lease_s)
            case JoinAccepted(join) | QuorumChanged(join):
                if self._session.is_waiting(join):
                    self._handed = self._session.full_answer(message)
                    if self._handed is None:
                        self._send(self._session.request_full(self._clock()))
            case JoinRejected(join):
                self._waits = self._waits or self._session.end_join(join)
            case QuorumOrder():
                self._apply_order(message)
            case _:
                pass
        self._open()
        if self._waits:
            self._ask()
        self._flush()

    def _apply_order(self, order: QuorumOrder | None) -> None:
        if order is None:
            return
        if self._requests.apply_order(order):
            self._crowd.tally.revokes += 1
            self._crowd.tally.revoked_at = time.monotonic()
            if self._computes:
                self._discard()
        handed = self._handed
        if handed is not None and order.phase is QuorumPhase.REVOKED and order.quorum_id == handed.quorum.quorum_id:
            self._session.end_join(handed.join)
            self._handed, self._waits = None, True

    def _discard(self) -> None:
        self._crowd.lockstep.leave(self)
        self._crowd.tally.discards += 1
        self._computes = False
        self._failures += 1
        self._ask()

    # -- the next step

    def _ask(self) -> None:
        """Request the next step, as a rank would."""
        now = self._clock()
        self._waits = False
        if self._requests.grant_next(now):
            self._begin()
            return
        ask = QuorumRequest(0, 0, self._step, math.inf, tag_quorum_id=self._tag, commit_failures=self._failures)
        decision = decide_request(self._group, ask, now)
        if self._group.standing is not None and decision.mode is not None:
            self._group.standing.mode = decision.mode
        match decision.verdict:
            case Verdict.JOIN:
                self._send(self._session.join(self._participant(), now + self._crowd.timeout_s, now))
            case Verdict.WAIT:
                self._waits = True
            case _:
                raise RuntimeError(f"{self._me.replica_id}: step {self._step} was granted twice")

    def _open(self) -> None:
        """Begin the first step of a new quorum if the lease is valid."""
        handed = self._handed
        if handed is None or self._clock() >= self._group.renewed_until:
            return
        if not handed.stands:
            raise RuntimeError(f"quorum {handed.quorum.quorum_id} does not stand")
        self._session.end_join(handed.join)
        self._handed = None
        self.quorum, self._step = handed.quorum, self._crowd.max_step(handed.quorum)
        self._requests.hold(handed.quorum, self._step)
        self._crowd.enter(handed.quorum)
        self._begin()

    def _begin(self) -> None:
        assert self.quorum is not None
        self._computes = True
        self._crowd.lockstep.come(self, self.quorum, self._step)

    def _participant(self) -> Participant:
        return replace(
            self._me,
            step=self._step,
            tag_quorum_id=self._tag,
            commit_failures=self._failures,
            seen_quorum_id=self.quorum.quorum_id if self.quorum else 0,
        )

    def _report(self) -> GroupReport:
        return GroupReport(self._group.standing.held if self._group.standing is not None else None)

    def _send(self, messages: list[ToLighthouse]) -> None:
        for message in messages:
            is_beat = isinstance(message, Heartbeat)
            self._crowd.tally.beats += is_beat
            self._crowd.tally.messages += not is_beat
            self._link.send(message)

    def _flush(self) -> None:
        now = self._clock()
        self._send(self._session.tick(self._report(), now))
        self._session.silence_change(now)  # takes the news without acting on it
        self._timer.set(self._session.deadline())


class Lockstep:
    """A collective of all participants."""

    def __init__(self, on_step: Callable[[float], None]) -> None:
        """Start with infinitely long steps. `on_step` receives the duration of each step."""
        self._on_step = on_step
        self._step_s = math.inf
        self._meetings: dict[Key, set[LightManager]] = {}
        self._sizes: dict[Key, int] = {}
        self._completed_at = math.inf

    def come(self, manager: LightManager, quorum: Quorum, step: int) -> None:
        key = (quorum.quorum_id, step)
        self._sizes[key] = len(quorum.participants)
        self._meetings.setdefault(key, set()).add(manager)
        self._run(key)

    def leave(self, manager: LightManager) -> None:
        for key, meeting in list(self._meetings.items()):
            meeting.discard(manager)
            if not meeting:
                self._forget(key)

    def pace(self, step_s: float) -> None:
        """Complete each step `step_s` after its last member has arrived, or never if infinite."""
        self._completed_at, self._step_s = math.inf, step_s
        for key in list(self._meetings):
            self._run(key)

    def _run(self, key: Key) -> None:
        if self._step_s < math.inf and self._is_full(key):
            asyncio.get_running_loop().call_later(self._step_s, self._end, key)

    def _is_full(self, key: Key) -> bool:
        return len(self._meetings.get(key, ())) == self._sizes.get(key)

    def _end(self, key: Key) -> None:
        if not self._is_full(key):  # a member has left, so the quorum will be revoked
            return
        meeting = self._forget(key)
        now = time.monotonic()
        self._on_step(now - self._completed_at)
        self._completed_at = now
        for manager in meeting:
            manager.complete()

    def _forget(self, key: Key) -> set[LightManager]:
        self._sizes.pop(key, None)
        return self._meetings.pop(key, set())


class Crowd:
    def __init__(self, address: str, job: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.address = address
        self.tally = Tally()
        self.lockstep = Lockstep(self._note_step)
        self.managers: list[LightManager] = []
        self._job = job
        self._reader = SharedReader()
        self._turns = Turns()
        self.quorums = SharedQuorums()
        self._max_step = (0, 0)
        self._entered: Counter[int] = Counter()
        self._expected = 0
        self._all_train = asyncio.Event()
        self._connects = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self._numbers = 0
        self._reported_cpu_s, self._reported_bytes = 0.0, 0

    def connect(self, source: str) -> SharingClient:
        return SharingClient(self.address, self._job, self._reader, self._turns, source)

    def max_step(self, quorum: Quorum) -> int:
        """Return the highest step in the quorum, computed once for all managers."""
        if self._max_step[0] != quorum.quorum_id:
            self._max_step = (quorum.quorum_id, max(member.step for member in quorum.participants))
        return self._max_step[1]

    def welcomed(self) -> None:
        """Let another manager connect, since one has connected."""
        self._connects.release()

    def enter(self, quorum: Quorum) -> None:
        """Count a manager that trains under that quorum."""
        self._entered[quorum.quorum_id] += 1
        if self._entered[quorum.quorum_id] == self._expected:
            self._all_train.set()

    async def do(self, what: str, **fields: Any) -> dict[str, Any]:
        """Run an order (one of the methods below), and return the events since the last report."""
        await {"add": self.add, "die": self.die, "pace": self.pace, "report": self.report}[what](**fields)
        cpu_s, carried = time.process_time(), self._reader.carried
        spent = {"cpu_s": cpu_s - self._reported_cpu_s, "bytes": carried - self._reported_bytes}
        tally, self.tally, self._reported_cpu_s, self._reported_bytes = self.tally, Tally(), cpu_s, carried
        return {**spent, **asdict(tally), "quorums": sorted({m.quorum.quorum_id for m in self.managers if m.quorum})}

    async def add(self, count: int) -> None:
        """Add managers and wait until all train together. They join after all of them have connected."""
        self._expected += count
        self._all_train.clear()
        newcomers = list[LightManager]()
        for _ in range(count):
            await asyncio.wait_for(self._connects.acquire(), self.timeout_s)
            newcomers.append(LightManager(self, self._numbers))
            self._numbers += 1
        for _ in range(CONNECTS_AT_ONCE):
            await asyncio.wait_for(self._connects.acquire(), self.timeout_s)
        for _ in range(CONNECTS_AT_ONCE):
            self._connects.release()
        self.managers += newcomers
        for manager in newcomers:
            manager.start()
        await asyncio.wait_for(self._all_train.wait(), self.timeout_s)

    async def die(self, count: int) -> None:
        """End managers without a notice, and wait until all others train together."""
        self._expected -= count
        self._all_train.clear()
        dying, self.managers = self.managers[:count], self.managers[count:]
        for manager in dying:
            manager.die()
        await asyncio.wait_for(self._all_train.wait(), self.timeout_s)

    async def pace(self, step_s: float) -> None:
        self.lockstep.pace(step_s)

    async def report(self) -> None:
        pass

    def _note_step(self, took_s: float) -> None:
        self.tally.longest_step_s = max(self.tally.longest_step_s, took_s)
        if took_s > 0:  # not the first one after a pause
            self.tally.steps_s.append(took_s)


async def serve(address: str, job: str, timeout_s: str = "60") -> None:
    await answer_orders_async(Crowd(address, job, float(timeout_s)).do)


def main() -> None:
    allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(*sys.argv[1:]))


if __name__ == "__main__":
    main()
