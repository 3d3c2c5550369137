"""State machine of one rank in a run, and of its connection to the lighthouse.

This module does no I/O and reads no clock. A *run* is all ranks that execute one wrapped function together. A
*generation* is a numbered attempt to execute the function. A *spare* is a rank that is ready but not part of the
current generation.

        Waiting         formed         ended, stopped      Raised, Returned
    idle ---> ready ----------> running ------------> leaving ------------> idle
               |  ^ formed with it  |  Raised -> idle, with a FailureReport
               v  |                 |  Returned -> finished ---- completed -> the end; ended -> ready
              spare                 |  Waiting -> ready: it requests the next generation itself

    formed, ended: GenerationFormed, GenerationEnded; completed, stopped: RunCompleted, RunStopped

1. A rank runs only generations that the lighthouse has formed, and each of them once. While the lighthouse is
   unreachable, a running rank continues and a waiting rank waits.
2. When a generation has ended, the rank's function is interrupted repeatedly. If it is still running after a timeout,
   the process is killed.
3. On each new stream, the rank repeats its current state (last generation, ready, failed, finished, closing), so no
   message is lost with a stream. The rank also repeats its slot, the number that identifies it in the run, because
   in an elastic run the lighthouse assigns the slots. A failure is repeated until the lighthouse reports that the
   generation has ended.
4. RunStopped, RunCompleted, or a refusal that a retry cannot change ends the rank's part in the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_client.restart.rules import events
from agent_client.restart.rules.events import InterruptTimer, RankConfig, RankPhase
from lighthouse_protocol.messages.incident import EvidenceAsked
from lighthouse_protocol.messages.run import (
    CloseReport,
    FailureReport,
    FinishReport,
    FromRunRank,
    GenerationEnded,
    GenerationFormed,
    HelloRejected,
    RankHeartbeat,
    RankHello,
    RankWelcome,
    ReadyReport,
    RunCompleted,
    RunStopped,
    SlotGiven,
    ToRunRank,
)
from lighthouse_protocol.refusals import (
    DuplicateReplica,
    InvalidRequest,
    LighthouseError,
    NotPermitted,
    NotServed,
    Superseded,
    Unreachable,
    WrongState,
)

_FINAL = (InvalidRequest, WrongState, NotPermitted, NotServed, Superseded)

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0


@dataclass(slots=True)
class Reconnect:
    """Tracks the rank's connection to the lighthouse, and when to open the next stream.

    1. There is one stream at a time, identified by a number. Messages from older streams are ignored.
    2. A stream is accepted when its first message arrives. If it is not accepted in time, or closes, another one is
       opened after a delay with jitter. The delay doubles until a stream has been accepted.
    3. If another process has the rank's slot (its number in the run), the rank retries for `duplicate_timeout_s`,
       because the lighthouse may not have noticed yet that the previous process in the slot has died.
    """

    accept_timeout_s: float
    duplicate_timeout_s: float
    session: int = 0
    is_open: bool = False
    since: float | None = None
    is_lost: bool = False
    _delay_s: float = FIRST_DELAY_S
    next_at: float | None = None
    """When to open a stream, or to cancel the open stream because it was not accepted."""
    _refused_since: float | None = None

    def open(self, now: float) -> int:
        self.session += 1
        self.is_open = True
        self.since = now if self.since is None else self.since
        self.next_at = now + self.accept_timeout_s
        return self.session

    def accept(self) -> bool:
        """Record that the stream has been accepted. Return whether the connection had been reported as lost."""
        was_lost, self.is_lost = self.is_lost, False
        self.since, self.next_at, self._delay_s, self._refused_since = None, None, FIRST_DELAY_S, None
        return was_lost

    def close(self, now: float, jitter: float) -> bool:
        """Record that the stream has closed. Return whether the connection must now be reported as lost.

        `jitter` is a random number from 0 to 1, which varies the delay before the next stream is opened.
        """
        is_news, self.is_lost = not self.is_lost, True
        self._close(now, jitter)
        return is_news

    def refuse(self, now: float, jitter: float) -> bool:
        """Record that another process has the slot. Return whether this is the first such refusal, to log it once."""
        self._close(now, jitter)
        return self._refused_since == now

    def _close(self, now: float, jitter: float) -> None:
        self.is_open = False
        self.since = now if self.since is None else self.since
        self.next_at = now + self._delay_s * (0.5 + jitter)
        self._delay_s = min(MAX_DELAY_S, 2 * self._delay_s)

    def is_final(self, error: LighthouseError, now: float) -> bool:
        """Return whether a retry is pointless after `error`, which has just closed the stream."""
        if not isinstance(error, DuplicateReplica):
            return isinstance(error, _FINAL)
        self._refused_since = now if self._refused_since is None else self._refused_since
        return now - self._refused_since >= self.duplicate_timeout_s

    def give_up(self) -> None:
        self.is_open, self.next_at = False, None

    def is_due(self, now: float) -> bool:
        return self.next_at is not None and now >= self.next_at


_WAITS = (RankPhase.READY, RankPhase.SPARE)


class RankMachine:
    """Decides, from events, when a rank connects, what it reports, and when it runs and interrupts its function."""

    def __init__(self, entry: RankHello, config: RankConfig) -> None:
        self.config = config
        self.phase = RankPhase.IDLE
        self.generation = entry.generation
        self.seen = entry.seen
        self.step = entry.step
        self.outcome: RunCompleted | RunStopped | LighthouseError | None = None
        self._entry = entry
        self._stream = Reconnect(self.config.accept_timeout_s, self.config.duplicate_timeout_s)
        self._leaving = InterruptTimer(self.config.interrupt_interval_s, self.config.hard_timeout_s)
        self._failure: FailureReport | None = None
        self._is_closing = False
        self._beat_at = 0.0
        self._report_at: float | None = None
        self._stepped_at: float | None = None
        self._is_back = False  # True if the lighthouse is reachable again and this is not reported yet

    @property
    def slot(self) -> int:
        return self._entry.rank.slot

    @property
    def has_lighthouse(self) -> bool:
        return self._stream.since is None

    @property
    def has_ended(self) -> bool:
        """True once the rank's part in the run has ended. Its function may still be running."""
        return self.outcome is not None

    # -- events and time

    def start(self, now: float) -> Sequence[events.RankEffect]:
        """Open the first stream, and return the effects to perform. Call this once, before any other method."""
        return self._connect(now)

    def handle(self, event: events.RankEvent, now: float) -> Sequence[events.RankEffect]:
        match event:
            case events.MessageReceived(session, message):
                effects = self._receive(session, message, now)
            case events.StreamClosed(session, error, jitter):
                effects = self._closed(session, error, jitter, now)
            case events.StepDone(step):
                effects = self._step(step, now)
            case events.Waiting():
                effects = self._wait()
            case events.Raised(reason):
                effects = self._become_idle(FailureReport(self.generation or 0, reason))
                if not self.has_ended:
                    self._leaving.start_cleanup(now)
            case events.Returned():
                effects = self._return()
            case events.Closing():
                self._is_closing = True
                effects = self._send(CloseReport())
        return [*effects, *self.tick(now)]

    def tick(self, now: float) -> Sequence[events.RankEffect]:
        effects: list[events.RankEffect] = [*self._leaving.tick(now)]
        if self.has_ended:
            return effects
        effects += self._check_silence(now)
        effects += self._check_stream(now)
        return effects + self._check_heartbeat(now)

    def deadline(self, now: float) -> float | None:
        """Return when to call `tick` next, or None if never. After `tick(now)`, the result is later than `now`."""
        moments: list[float | None] = [self._leaving.deadline]
        if not self.has_ended:
            moments += [self._stream.next_at, self._give_up_at(), self._silent_at()]
            moments += [self._beat_at, self._report_at] if self._stream.is_open else []
        return min((moment for moment in moments if moment is not None), default=None)

    # -- the stream

    def _connect(self, now: float) -> list[events.RankEffect]:
        session = self._stream.open(now)
        self._beat_at = now + self.config.beat_interval_s
        return [events.Connect(session), *(events.Send(session, message) for message in self._held())]

    def _held(self) -> list[FromRunRank]:
        """Return the messages that report the rank's current state on a new stream."""
        is_ready = self.phase in _WAITS
        entry = replace(
            self._entry,
            generation=self.generation,
            is_ready=is_ready and self._failure is None,
            seen=self.seen,
            step=self.step,
        )
        held: list[FromRunRank] = [entry]
        if self._failure is not None:
            held += [self._failure, ReadyReport(self.generation)] if is_ready else [self._failure]
        if self.phase is RankPhase.FINISHED and self.generation is not None:
            held.append(FinishReport(self.generation))
        if self._is_closing:
            held.append(CloseReport())
        return held

    def _send(self, *messages: FromRunRank) -> list[events.RankEffect]:
        """Send messages on the stream. If no stream is open, drop them, because the next stream repeats the state."""
        if not self._stream.is_open:
            return []
        return [events.Send(self._stream.session, message) for message in messages]

    def _is_current(self, session: int) -> bool:
        return not self.has_ended and self._stream.is_open and session == self._stream.session

    def _closed(
        self, session: int, error: LighthouseError | None, jitter: float, now: float
    ) -> list[events.RankEffect]:
        if not self._is_current(session):
            return []
        if error is not None and self._stream.is_final(error, now):
            return self._end_run(error, now)
        if isinstance(error, DuplicateReplica):
            notice = events.Notice(f"the lighthouse does not admit this rank yet: {error}")
            return [notice] if self._stream.refuse(now, jitter) else []
        is_news = self._stream.close(now, jitter)
        return [events.Notice(f"lighthouse unreachable: {error or 'it closed the stream'}")] if is_news else []

    def _check_stream(self, now: float) -> list[events.RankEffect]:
        gives_up_at = self._give_up_at()
        if gives_up_at is not None and now >= gives_up_at:
            waited_s = self.config.lighthouse_timeout_s
            return self._end_run(Unreachable(f"the lighthouse was not reached for {waited_s:g} s; is it running?"), now)
        if not self._stream.is_due(now):
            return []
        if not self._stream.is_open:
            return self._connect(now)
        session = self._stream.session
        reason = f"no answer within {self.config.accept_timeout_s:g} s"
        return [events.Disconnect(session), *self._closed(session, Unreachable(reason), 0.5, now)]

    def _give_up_at(self) -> float | None:
        """Return when this rank gives up on the lighthouse, or None while it is connected or its function runs."""
        since = self._stream.since
        if since is None or self.phase in (RankPhase.RUNNING, RankPhase.LEAVING):
            return None
        return since + self.config.lighthouse_timeout_s

    # -- messages of the lighthouse

    def _receive(self, session: int, message: ToRunRank, now: float) -> list[events.RankEffect]:
        if not self._is_current(session):
            return []
        if isinstance(message, HelloRejected):
            return self._closed(session, message.error, 0.5, now)
        self._is_back = self._stream.accept() or self._is_back
        match message:
            case SlotGiven(slot):
                self._entry = replace(self._entry, rank=replace(self._entry.rank, slot=slot))
                return []
            case RankWelcome(term):
                was_away, self._is_back = self._is_back, False
                text = "lighthouse reachable again" + (f" (term {term})" if term else "")
                return [events.Notice(text)] if was_away else []
            case GenerationFormed():
                return self._formed(message, now)
            case GenerationEnded(number, reason, _):
                return self._handle_generation_end(number, reason, now)
            case RunStopped() | RunCompleted():
                return self._end_run(message, now)
            case EvidenceAsked():  # the thread that reads the stream answers
                return []

    def _formed(self, formed: GenerationFormed, now: float) -> list[events.RankEffect]:
        number = formed.counters.number
        if self.generation is not None and number <= self.generation:
            return []
        self.seen = max(number, -1 if self.seen is None else self.seen)
        if self.phase not in _WAITS:
            return (
                []
                if self.generation is None
                else self._handle_generation_end(self.generation, f"generation {number} runs", now)
            )
        self._failure = None
        if self.slot not in formed.slots:
            was_spare, self.phase = self.phase is RankPhase.SPARE, RankPhase.SPARE
            text = f"generation {number} runs without this rank, which is a spare"
            return [] if was_spare else [events.Notice(text, is_warning=False)]
        self.generation, self.phase, self._stepped_at = number, RankPhase.RUNNING, None
        return [events.Run(formed.counters, formed.slots.index(self.slot), len(formed.slots))]

    def _handle_generation_end(self, number: int, reason: str, now: float) -> list[events.RankEffect]:
        if number != self.generation:
            return []
        self._failure = None
        if self.phase is RankPhase.FINISHED:
            self.phase = RankPhase.READY
            return self._send(ReadyReport(number))
        self._interrupt(reason, now)
        return []

    def _end_run(self, outcome: RunCompleted | RunStopped | LighthouseError, now: float) -> list[events.RankEffect]:
        self.outcome = outcome
        effects: list[events.RankEffect] = [events.Disconnect(self._stream.session)] if self._stream.is_open else []
        self._stream.give_up()
        reason = outcome.reason if isinstance(outcome, RunStopped) else str(outcome)
        self._interrupt(reason, now)
        return [*effects, events.Ended(outcome)]

    # -- events of the function

    def _wait(self) -> list[events.RankEffect]:
        if self.phase in (*_WAITS, RankPhase.FINISHED):
            return []
        self.phase = RankPhase.READY
        self._leaving.stop()
        return self._send(ReadyReport(self.generation))

    def _become_idle(self, failure: FailureReport | None) -> list[events.RankEffect]:
        """Enter the idle phase, because the function has ended. Report `failure`, if any, unless it was interrupted."""
        has_failed = self.phase is RankPhase.RUNNING and failure is not None
        self.phase = RankPhase.IDLE
        self._leaving.stop()
        if not has_failed or failure is None:
            return []
        self._failure = failure
        return self._send(failure)

    def _return(self) -> list[events.RankEffect]:
        if self.phase is RankPhase.LEAVING:  # an interrupted function has returned: wait for the next generation
            return self._wait()
        if self.phase is not RankPhase.RUNNING or self.generation is None:
            return self._become_idle(None)
        self.phase = RankPhase.FINISHED
        return self._send(FinishReport(self.generation))

    def _step(self, step: int, now: float) -> list[events.RankEffect]:
        self._stepped_at = now
        if step > self.step:
            self.step = step
            last_at = self._beat_at - self.config.beat_interval_s
            self._report_at = max(now, last_at + self.config.report_interval_s)
        return []

    # -- time

    def _interrupt(self, reason: str, now: float) -> None:
        """Start interrupting the function if it is running. `tick` then returns the Interrupt effects."""
        if self.phase is RankPhase.RUNNING:
            self.phase = RankPhase.LEAVING
            self._leaving.start(reason, now)

    def _silent_at(self) -> float | None:
        limit_s = self.config.soft_timeout_s
        if limit_s is None or self._stepped_at is None or self.phase is not RankPhase.RUNNING:
            return None
        return self._stepped_at + limit_s

    def _check_silence(self, now: float) -> list[events.RankEffect]:
        silent_at = self._silent_at()
        if silent_at is None or now < silent_at or self.generation is None:
            return []
        reason = f"no ping for {self.config.soft_timeout_s:g} s (soft_timeout): call ping() in long operations, too"
        self._failure = FailureReport(self.generation, reason)
        self._interrupt(self._failure.reason, now)
        return [*self._send(self._failure), *self._leaving.tick(now)]

    def _check_heartbeat(self, now: float) -> list[events.RankEffect]:
        if not self._stream.is_open:
            return []
        if now < self._beat_at and (self._report_at is None or now < self._report_at):
            return []
        self._beat_at, self._report_at = now + self.config.beat_interval_s, None
        return self._send(RankHeartbeat(self.step, self.phase.value))
