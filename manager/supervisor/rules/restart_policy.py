"""Restart policy: whether and when lost ranks restart, and which host is excluded. This module does no I/O.

1. The exit status of a rank means that it is done (0), that the run must stop (the stop exit code, or SIGINT), or that
   the rank is lost (any other status).
2. After a loss, the ranks restart, unless restarts do not help: the same host fails repeatedly, the ranks fail at every
   start, or the number of losses within a sliding time window exceeds the budget. An exhausted budget ends the run for
   all groups. If the group failed because it does not fit its peers, only this group ends.
3. The delay doubles with each restart, with jitter. Losses that are older than the window no longer count.

`Report` stores what a supervisor must report to the lighthouse, and repeats it when a stream breaks.
"""

import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lighthouse_protocol.messages.run import HostExcluded, ProcessLost, StopAsked
from lighthouse_protocol.refusals import DuplicateReplica, LighthouseError
from lighthouse_protocol.rules.rate_limits import share_used

GROUP_SCOPE = "group"
RANK_SCOPE = "rank"


class Outcome(StrEnum):
    DONE = "done"
    ABORT = "abort"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Options of the restart policy."""

    max_restarts: int = 3
    window_s: float = 3600.0
    delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_startup_failures: int = 3  # 0 disables the limit on failures at start-up
    startup_s: float = 10.0
    exclude_host_after: int = 0  # number of consecutive losses that began on the same host; 0 disables exclusion
    stop_exit_code: int = 130  # a rank that exits with it stops the run; 0 disables this
    scope: str = GROUP_SCOPE  # whether the whole group (GROUP_SCOPE) or each rank (RANK_SCOPE) restarts
    restart_after_kill: bool = True


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class Exclude:
    """Decision to exclude a host from the run, and to end the group."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision to end the group, or the whole run."""

    reason: str
    is_for_all: bool  # whether the whole run stops, not only this group


Decision = Restart | Exclude | GiveUp


def outcome(status: int, stop_exit_code: int) -> Outcome:
    """Classify an exit status, which is an exit code or a negated signal number, as in subprocess.

    A rank that dies of SIGINT, or exits with a `stop_exit_code` other than 0, stops the run.
    """
    if status == 0:
        return Outcome.DONE
    is_abort = status == -signal.SIGINT or (stop_exit_code != 0 and status == stop_exit_code)
    return Outcome.ABORT if is_abort else Outcome.LOST


def describe_status(status: int) -> str:
    """Describe an exit status in text, such as "exit code 1" or "SIGSEGV"."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"{name} (kill -9, or the kernel was out of memory)" if name == "SIGKILL" else name


@dataclass(frozen=True, slots=True)
class _Loss:
    at: float
    host: int
    is_misfit: bool


@dataclass(slots=True)
class RestartBudget:
    """Counts the losses of ranks that restart together, and decides whether they restart.

    `draw` returns random numbers from 0 to 1 for the jitter of the delay.
    """

    policy: RestartPolicy
    draw: Callable[[], float]
    _losses: list[_Loss] = field(default_factory=list)
    _early: int = 0

    def record_loss(self, host: int, lived_s: float, now: float, *, is_misfit: bool = False) -> Decision:
        """Record a loss that began on `host`. Return the decision to restart, to exclude a host, or to give up.

        The ranks had run for `lived_s` seconds. `is_misfit` means that the group does not fit its peers.
        """
        policy = self.policy
        self._early = self._early + 1 if lived_s < policy.startup_s else 0
        self._losses = [loss for loss in self._losses if now - loss.at < policy.window_s]
        loss = _Loss(now, host, is_misfit)
        decision = self._refusal([*self._losses, loss])
        if decision is not None:
            return decision
        delay_s = min(policy.max_delay_s, policy.delay_s * 2.0 ** min(len(self._losses), 60))
        self._losses.append(loss)
        return Restart(delay_s * (0.5 + 0.5 * self.draw()))

    def used(self, now: float) -> float:
        """Return how much of the restart budget is used up, from 0 to 1."""
        return share_used(self._recent(now), self.policy.max_restarts)

    def left(self, now: float) -> int:
        """Return how many more restarts the budget allows at time `now`."""
        return max(0, self.policy.max_restarts - self._recent(now))

    def _recent(self, now: float) -> int:
        return sum(now - loss.at < self.policy.window_s for loss in self._losses)

    def _refusal(self, losses: Sequence[_Loss]) -> Exclude | GiveUp | None:
        policy = self.policy
        recent = losses[-policy.exclude_host_after :] if 0 < policy.exclude_host_after <= len(losses) else ()
        if recent and all(loss.host == losses[-1].host for loss in recent):
            return Exclude(losses[-1].host, f"it was the first to fail {policy.exclude_host_after} times in a row")
        if 0 < policy.max_startup_failures <= self._early:
            what = f"{self._early} deaths in a row within {policy.startup_s:g} s of the start"
            return GiveUp(f"start-up failure: {what}", is_for_all=False)
        if len(losses) > policy.max_restarts:
            what = f"the budget of {policy.max_restarts} restarts within {policy.window_s:g} s is exhausted"
            misfits = sum(loss.is_misfit for loss in losses)
            is_for_all = len(losses) - misfits > policy.max_restarts
            whose = "" if is_for_all else f", {misfits} of them because this group does not fit its peers"
            return GiveUp(what + whose, is_for_all=is_for_all)
        return None


MAX_KEPT_LOSSES = 1000
# How long to retry if the name is taken. The lighthouse may not have noticed yet that the last supervisor has exited.
DUPLICATE_TIMEOUT_S = 45.0
# A message that was sent more than this time before the stream broke has arrived: dead connections are detected sooner.
DOUBT_S = 60.0


class Report:
    """Sends a supervisor's reports to the lighthouse, and repeats them after a stream has broken.

    The requested stop and the excluded host are sent first on each new stream. The loss of a rank is sent again only if
    the stream breaks within DOUBT_S. The lighthouse recognizes repetitions. `send` is only called between
    `begin_stream` and `end_stream`.
    """

    def __init__(self, send: Callable[[StopAsked | HostExcluded | ProcessLost], None]) -> None:
        self.stop: StopAsked | None = None
        self._send = send
        self._excluded: HostExcluded | None = None
        self.is_open = False
        self._losses: deque[ProcessLost] = deque(maxlen=MAX_KEPT_LOSSES)
        self._sent: deque[tuple[float, ProcessLost]] = deque(maxlen=MAX_KEPT_LOSSES)
        self._refused_since: float | None = None

    def is_final(self, error: LighthouseError, now: float) -> bool:
        """Return whether the lighthouse's refusal is final, which means that a retry would not help.

        A duplicate name is final after DUPLICATE_TIMEOUT_S, because the predecessor's stream should be closed by then.
        """
        if not isinstance(error, DuplicateReplica):
            return True
        self._refused_since = now if self._refused_since is None else self._refused_since
        return now - self._refused_since >= DUPLICATE_TIMEOUT_S

    def begin_stream(self, now: float) -> None:
        """Report the excluded host, the requested stop and the pending losses to the lighthouse on a new stream."""
        self.is_open, self._refused_since = True, None
        for level in (self._excluded, self.stop):
            if level is not None:
                self._send(level)
        self._send_losses(now)

    def end_stream(self, now: float) -> None:
        """Record that the stream has closed, and queue the losses that may not have arrived for the next one."""
        self.is_open = False
        doubtful = [lost for sent_at, lost in self._sent if sent_at >= now - DOUBT_S]
        self._sent.clear()
        self._losses = deque((*doubtful, *self._losses), maxlen=MAX_KEPT_LOSSES)

    def add_loss(self, lost: ProcessLost, now: float) -> None:
        self._losses.append(lost)
        self._send_losses(now)

    def ask_stop(self, reason: str) -> None:
        self.stop = StopAsked(reason)
        if self.is_open:
            self._send(self.stop)

    def exclude(self, reason: str) -> None:
        self._excluded = HostExcluded(reason)
        if self.is_open:
            self._send(self._excluded)

    def _send_losses(self, now: float) -> None:
        while self.is_open and self._losses:
            lost = self._losses.popleft()
            self._send(lost)
            self._sent.append((now, lost))
