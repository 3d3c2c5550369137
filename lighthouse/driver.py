"""The loop's side of the quorum machines: feed an event, perform the effects, re-arm one timer; one machine a job."""

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from lighthouse.quorum import (
    Effect,
    Event,
    HeartbeatReceived,
    Joined,
    JoinRefused,
    QuorumConfig,
    QuorumFormed,
    QuorumMachine,
    Verdict,
    Withdrawn,
)
from lighthouse.roster import Member
from lighthouse.status import explain, job_status
from lighthouse_runtime.timer import DeadlineTimer
from protos import wire
from protos.identity import check_name, split_replica_id
from protos.limits import answer_margin_s
from protos.membership import Participant, Quorum
from protos.refusals import DeadlinePassed, LimitReached, UnknownName, Unreachable
from protos.status import JobStatus

log = logging.getLogger(__name__)

MAX_JOBS = 1000
NAMES_LOGGED = 16
# A round takes milliseconds: only a wait that lasts is worth a line.
LOG_WAIT_AFTER_S = 1.0


class Answer:
    """A formed quorum; each form is serialised once, whoever and however many ask for it."""

    def __init__(self, quorum: Quorum) -> None:
        self.quorum = quorum
        self._created_at = time.time()

    @functools.cached_property
    def native(self) -> bytes:
        return wire.quorum_to_native(self.quorum, self._created_at).SerializeToString()

    @functools.cached_property
    def torchft(self) -> bytes:
        return wire.quorum_to_torchft(self.quorum, self._created_at).SerializeToString()


class JobDriver:
    def __init__(self, job: str, config: QuorumConfig) -> None:
        self.job = job
        self.machine = QuorumMachine(config)
        self._clock = asyncio.get_running_loop().time
        self._timer = DeadlineTimer(self._tick)
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._logged: Verdict | None = None
        self._log_timer: asyncio.TimerHandle | None = None

    async def join(self, participant: Participant, time_left_s: float) -> Answer:
        """The next quorum with `participant` in it. Raises a refusal, at the latest when the time is over."""
        call, now = next(self._calls), self._clock()
        answer = self._waiting[call] = asyncio.get_running_loop().create_future()
        self._feed(Joined(call, participant, now + time_left_s))
        try:
            async with asyncio.timeout(time_left_s - answer_margin_s(time_left_s)):
                return await answer
        except TimeoutError:
            if answer.done() and not answer.cancelled():  # it came in the same moment
                return answer.result()
            reason = f"{self.machine.verdict()}: {explain(self.machine, self._clock())}"
            raise DeadlinePassed(f"no quorum within {time_left_s:.3g} s: {reason}") from None
        finally:
            if self._waiting.pop(call, None) is not None:
                self._feed(Withdrawn(call))

    def beat(self, replica_id: str, incarnation: str) -> None:
        self._feed(HeartbeatReceived(replica_id, incarnation))

    def status(self) -> JobStatus:
        return job_status(self.job, self.machine, self._clock())

    def member(self, wire_id: str) -> Member | None:
        return self.machine.roster.get(wire_id) or self.machine.roster.get(split_replica_id(wire_id)[0])

    @property
    def is_quiet(self) -> bool:
        return self.machine.is_quiet and not self._waiting

    def close(self, reason: str) -> None:
        self._timer.cancel()
        self._stop_watching()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Unreachable(reason))

    def _feed(self, event: Event) -> None:
        now = self._clock()
        self._perform(self.machine.handle(event, now), now)

    def _tick(self) -> None:
        now = self._clock()
        self._perform(self.machine.tick(now), now)

    def _perform(self, effects: Sequence[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case QuorumFormed(quorum, calls, is_new):
                    self._answer(Answer(quorum), calls)
                    self._log_quorum(quorum, is_new)
                case JoinRefused(call, error):
                    waiter = self._waiting.pop(call, None)
                    if waiter is not None and not waiter.done():
                        waiter.set_exception(error)
        self._watch_verdict()
        self._timer.set(self.machine.deadline(now))

    def _answer(self, answer: Answer, calls: Sequence[int]) -> None:
        for call in calls:
            waiter = self._waiting.pop(call, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(answer)

    def _log_quorum(self, quorum: Quorum, is_new: bool) -> None:
        if not is_new:
            return
        names = [f"{p.replica_id}@{p.step}" for p in quorum.participants]
        more = f" and {len(names) - NAMES_LOGGED} more" if len(names) > NAMES_LOGGED else ""
        log.info("[%s] quorum %d: %s%s", self.job, quorum.quorum_id, " ".join(names[:NAMES_LOGGED]), more)

    def _watch_verdict(self) -> None:
        """Log why there is no quorum once that has lasted, and again when the reason changes."""
        if self.machine.verdict() in (Verdict.FORMED, Verdict.NOBODY_ASKS):
            self._logged = None
            self._stop_watching()
        elif self._log_timer is None:
            self._log_timer = asyncio.get_running_loop().call_later(LOG_WAIT_AFTER_S, self._log_verdict)

    def _log_verdict(self) -> None:
        self._log_timer = None
        verdict = self.machine.verdict()
        if verdict is not self._logged:
            self._logged = verdict
            log.info("[%s] no quorum: %s (%s)", self.job, verdict, explain(self.machine, self._clock()))
        self._watch_verdict()

    def _stop_watching(self) -> None:
        if self._log_timer is not None:
            self._log_timer.cancel()
            self._log_timer = None


class Jobs:
    """Every job's driver; made when first asked for, dropped when it has gone quiet."""

    def __init__(self, config: Callable[[int], QuorumConfig]) -> None:
        self._config = config
        self._drivers: dict[str, JobDriver] = {}
        self._closed = ""

    def __iter__(self) -> Iterator[JobDriver]:
        return iter(self._drivers.values())

    def get(self, job: str) -> JobDriver:
        """Raises a refusal for an unusable name, for too many jobs, and while the lighthouse is going away."""
        if self._closed:
            raise Unreachable(self._closed)
        driver = self._drivers.get(job)
        if driver is None:
            check_name(job, "job")
            self.forget_quiet()
            if len(self._drivers) >= MAX_JOBS:
                raise LimitReached(
                    f"job: {job} would be number {MAX_JOBS + 1}; the lighthouse takes {MAX_JOBS} at once"
                )
            # Above every id that an earlier lighthouse, or an earlier life of this job, can have given out.
            driver = self._drivers[job] = JobDriver(job, self._config(time.time_ns() // 1_000_000))
        return driver

    def find(self, job: str) -> JobDriver:
        """Raises UnknownName for a job that nobody has joined."""
        driver = self._drivers.get(check_name(job, "job"))
        if driver is None:
            known = ", ".join(sorted(self._drivers)[:NAMES_LOGGED]) or "none"
            raise UnknownName(f"job: nobody has asked for a quorum of {job!r}; known jobs: {known}")
        return driver

    def forget_quiet(self) -> None:
        for driver in [driver for driver in self._drivers.values() if driver.is_quiet]:
            driver.close("this job has gone quiet")
            del self._drivers[driver.job]

    def close(self, reason: str) -> None:
        """End every waiting call with `reason`; refuse new ones."""
        self._closed = reason
        for driver in self._drivers.values():
            driver.close(reason)
