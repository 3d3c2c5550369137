"""A manager without ranks. It has the product's session, grants and connection, so it looks real to a lighthouse."""

import asyncio
import math
import secrets
import time
from dataclasses import replace
from typing import Protocol

from benchmarks.support.lockstep import Lockstep, Tally
from benchmarks.support.shared_session import SharedQuorums, SharingRequests, SharingSession
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
from lighthouse_runtime.client.clients import AsyncLighthouseClient
from lighthouse_runtime.timing.timers import DeadlineTimer
from manager.group.events import QuorumRequest
from manager.group.link import LighthouseLink
from manager.group.records import ReplicaGroup
from manager.group.requests import LEASE_SHARE, Verdict, decide_request


class Crowd(Protocol):
    """The parts of the crowd that a manager uses."""

    address: str
    timeout_s: float
    tally: Tally
    lockstep: Lockstep
    quorums: SharedQuorums

    def connect(self, source: str) -> AsyncLighthouseClient: ...

    def max_step(self, quorum: Quorum) -> int: ...

    def welcomed(self) -> None: ...

    def enter(self, quorum: Quorum) -> None: ...


class LightManager:
    """Does the work of manager/group/machine.py and driver.py without ranks, calls and assignments.

    It opens no second connection when replies to heartbeats are late, since usually this crowded process is the cause.
    """

    def __init__(self, crowd: Crowd, number: int) -> None:
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
        self._crowd.tally.closings += 1

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
                    acked_s = self._clock() - sent_at
                    self._crowd.tally.longest_ack_s = max(self._crowd.tally.longest_ack_s, acked_s)
                    self._requests.renew_lease(sent_at + LEASE_SHARE * self._session.lease_s)
            case JoinAccepted(join) | QuorumChanged(join):
                if self._session.is_waiting(join):
                    self._handed = self._session.full_answer(message)
                    if self._handed is None:
                        self._send(self._session.request_full(self._clock()))
            case JoinRejected(join):
                self._crowd.tally.refusals += 1
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
