"""Candidates around one store, on one true time: clocks that drift, requests and answers that are late, twice or lost,
processes that are stopped for a while."""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from lighthouse.store import leadership
from lighthouse.store.leadership import Candidate, CandidateConfig, Leader

TTL_S = 3.0


class Clockwork:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), call))

    def run(self, until: float, look: Callable[[], None]) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call = heapq.heappop(self._queue)
            call()
            look()


class Store:
    """It ends a lease no sooner than its time, on its own clock."""

    def __init__(self, clockwork: Clockwork, rate: float) -> None:
        self.clockwork = clockwork
        self.rate = rate
        self.revision = 1
        self.term = 0
        self.key: tuple[Leader, int, int] | None = None  # with its lease and its create revision
        self.leases: dict[int, float] = {}
        self.is_down = False

    def _expire(self) -> None:
        clock = self.clockwork.now * self.rate
        self.leases = {lease: until for lease, until in self.leases.items() if until > clock}
        if self.key is not None and self.key[1] not in self.leases:
            self.key = None

    @property
    def leader(self) -> Leader | None:
        self._expire()
        return self.key[0] if self.key is not None else None

    def handle(self, name: str, request: leadership.Effect) -> leadership.Event | None:
        self._expire()
        clock = self.clockwork.now * self.rate
        match request:
            case leadership.ReadLeader(number):
                return leadership.LeaderRead(number, self.leader)
            case leadership.GrantLease(number, ttl_s):
                lease = max([*self.leases, 0]) + 1 + self.revision
                self.revision += 1
                self.leases[lease] = clock + ttl_s
                return leadership.LeaseGranted(number, lease, ttl_s)
            case leadership.Claim(number, lease):
                if lease not in self.leases:
                    return leadership.RequestFailed(number, "lease not found")
                if self.key is not None:
                    return leadership.ClaimLost(number, self.key[0])
                self.revision += 1
                self.term += 1
                self.key = Leader(name, name, name, self.term), lease, self.revision
                return leadership.ClaimWon(number, self.revision, self.term)
            case leadership.LoadRecords(number):
                return leadership.RecordsLoaded(number)
            case leadership.RenewLease(number, lease):
                if lease not in self.leases:
                    return leadership.LeaseEnded(number)
                self.leases[lease] = clock + TTL_S
                return leadership.LeaseRenewed(number, TTL_S)
            case leadership.RevokeLease(lease):
                self.leases.pop(lease, None)
                self._expire()
                return None
            case _:
                raise AssertionError(request)


class Process:
    def __init__(
        self, clockwork: Clockwork, store: Store, name: str, rate: float, loss: float, candidate: type[Candidate]
    ) -> None:
        self.clockwork, self.store, self.name, self.rate, self.loss = clockwork, store, name, rate, loss
        self.offset = clockwork.random.uniform(0, 1000)
        self.paused_until = 0.0
        self.config = CandidateConfig(name, TTL_S)
        self.candidate = candidate(self.config, self.clock())
        self.log: list[tuple[float, Any]] = []
        self._armed: float | None = None
        self._perform(self.candidate.tick(self.clock()))

    def clock(self) -> float:
        return self.clockwork.now * self.rate + self.offset

    def may_act(self) -> bool:
        return self.candidate.may_act(self.clock())

    def stop(self, for_s: float) -> None:
        self.paused_until = max(self.paused_until, self.clockwork.now + for_s)

    def _later(self, call: Callable[[], None]) -> None:
        """Now, or when it is let go on."""
        if self.clockwork.now < self.paused_until:
            self.clockwork.after(self.paused_until - self.clockwork.now, lambda: self._later(call))
        else:
            call()

    def _perform(self, effects: Any) -> None:
        for effect in effects:
            self.log.append((self.clockwork.now, effect))
            if isinstance(effect, leadership.LeadershipBegan | leadership.LeadershipEnded | leadership.LeaderChanged):
                continue
            self._send(effect)
        deadline = self.candidate.deadline()
        if deadline is not None and deadline != self._armed:
            self._armed = deadline
            delay_s = max(0.0, (deadline - self.clock()) / self.rate) + 1e-6
            self.clockwork.after(delay_s, lambda: self._later(lambda: self._tick(deadline)))

    def _tick(self, deadline: float) -> None:
        if deadline == self._armed:
            self._armed = None
            self._perform(self.candidate.tick(self.clock()))

    def _delay_s(self) -> float:
        draw = self.clockwork.random
        return draw.uniform(0.001, 0.01) if draw.random() < 0.8 else draw.uniform(0, 4)

    def _send(self, request: leadership.Effect) -> None:
        draw = self.clockwork.random

        def arrive() -> None:
            answer = None if self.store.is_down else self.store.handle(self.name, request)
            if answer is not None and draw.random() >= self.loss:
                copies = 2 if draw.random() < 0.05 else 1
                for _ in range(copies):
                    self.clockwork.after(self._delay_s(), lambda: self._later(lambda: self._feed(answer)))

        if draw.random() >= self.loss:
            self.clockwork.after(self._delay_s(), arrive)
        number = getattr(request, "number", None)
        if number is not None:
            failed = leadership.RequestFailed(number, "no answer")
            timeout_s = self.config.request_timeout_s / self.rate
            self.clockwork.after(timeout_s, lambda: self._later(lambda: self._feed(failed)))

    def _feed(self, event: leadership.Event) -> None:
        self._perform(self.candidate.handle(event, self.clock()))


class Race:
    """Two or three candidates under drawn faults."""

    def __init__(self, seed: int, candidate: type[Candidate] = Candidate) -> None:
        self.clockwork = clockwork = Clockwork(seed)
        draw = clockwork.random
        self.store = Store(clockwork, draw.uniform(0.9, 1.1))
        loss = draw.choice((0.0, 0.05, 0.3))
        self.processes = [
            Process(clockwork, self.store, name, draw.uniform(0.9, 1.1), loss, candidate)
            for name in "abc"[: draw.choice((2, 2, 3))]
        ]
        self._disturb()

    def _disturb(self) -> None:
        draw = self.clockwork.random
        match draw.randrange(4):
            case 0 | 1:
                draw.choice(self.processes).stop(draw.choice((0.3, 1.5, 2.5, 3.5, 8.0)))
            case 2:
                self.store.is_down = True
                self.clockwork.after(draw.choice((0.5, 2.5, 6.0)), self._mend)
            case _:
                pass
        self.clockwork.after(draw.uniform(0.5, 8), self._disturb)

    def _mend(self) -> None:
        self.store.is_down = False

    def look(self) -> None:
        """One that may act is the one that the store names; so there are never two."""
        acting = [process.name for process in self.processes if process.may_act()]
        leader = self.store.leader
        assert acting in ([], [leader.candidate if leader is not None else None]), (
            f"at {self.clockwork.now:.3f} s {acting} may act, and the store names {leader}"
        )

    def run(self, until: float = 90.0) -> None:
        self.clockwork.run(until, self.look)

    def begun(self) -> list[tuple[float, leadership.LeadershipBegan]]:
        found = [(at, e) for p in self.processes for at, e in p.log if isinstance(e, leadership.LeadershipBegan)]
        return sorted(found, key=lambda entry: entry[0])
