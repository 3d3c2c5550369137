"""Progress of a replica group's heal: bytes received, rate, time left, and log lines.

1. A rank's rate is measured over the last RATE_OVER_S. It falls to zero while no data arrives, and the time left is
   then unknown.
2. The rate of a restarted heal is measured from the restart. A heal counts as restarted if its number or process is
   new, or if its byte count has fallen because it changed its source.
3. The ranks in a group heal in parallel, so their bytes and rates are summed. The time left is the slowest rank's, and
   is unknown if any rank's is. A rank that has finished counts until all ranks have.
4. The log gets a line when a heal starts, every LOGGED_EVERY_S, and when the heal succeeds or fails.

Reports contain durations, not timestamps, so the clocks of sender and reader need not agree. This module does no I/O.
"""

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import replace

from lighthouse_protocol.limits import MAX_COUNT, MAX_SECONDS
from lighthouse_protocol.messages.progress import HealProgress
from lighthouse_protocol.messages.status import HealStatus
from lighthouse_protocol.rules.stall import span

RATE_OVER_S = 10.0
RATE_AFTER_S = 0.5
KEPT_EVERY_S = 0.25  # a report that arrives sooner replaces the last one
FRESH_S = 2.0  # a report up to this age counts as current, so the rate does not fall between two reports
STILL_SHOWN_S = 5.0  # after this time without data, log lines report it; even a slow link delivers some data sooner
LOGGED_EVERY_S = 10.0
SETTLED_S = 1.0  # the ranks of a group report the start and end of a heal up to this much apart
MAX_LEFT_S = 1e6
NAMES_SHOWN = 3
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class _RankHeal:
    def __init__(self, process: str, heal: HealProgress, at: float) -> None:
        self.heal = heal
        self.moved_at = at if heal.received else at - heal.seconds
        self._process = process
        self._moments: deque[tuple[float, int]] = deque([(at - heal.seconds, 0), (at, heal.received)])

    def is_continued_by(self, process: str, heal: HealProgress) -> bool:
        return (self._process, self.heal.number) == (process, heal.number) and heal.received >= self.heal.received

    def update(self, heal: HealProgress, at: float) -> None:
        moments = self._moments
        at = max(at, moments[-1][0])
        if heal.received > self.heal.received:
            self.moved_at = at
        self.heal = heal
        if at < moments[-2][0] + KEPT_EVERY_S:
            moments.pop()
        moments.append((at, heal.received))
        while moments[1][0] <= at - RATE_OVER_S:
            moments.popleft()

    def rate(self, now: float) -> float | None:
        """Return the rate in bytes per second, or None if the reports cover less than RATE_AFTER_S."""
        newest_at, received = self._moments[-1]
        until = newest_at if now - newest_at <= FRESH_S else now
        at, before = self._moments[0]
        for moment in self._moments:
            if moment[0] > until - RATE_OVER_S:
                break
            at, before = moment
        return (received - before) / (until - at) if until - at >= RATE_AFTER_S else None

    def left_s(self, now: float) -> float | None:
        total, rate = self.heal.total, self.rate(now)
        if total is None or not rate or now - self.moved_at >= STILL_SHOWN_S:
            return None
        left_s = max(0.0, (total - self.heal.received) / rate - max(0.0, now - self._moments[-1][0]))
        return left_s if left_s <= MAX_LEFT_S else None


class GroupHeal:
    """Tracks the heal of a replica group or of a single rank. The times passed to its methods must not decrease."""

    def __init__(self, settled_s: float = SETTLED_S, *, is_catching_up: bool = False) -> None:
        """Create a tracker for a group that is not healing.

        Args:
            settled_s: How long to wait for further ranks to begin their heal, after all known ones have finished.
            is_catching_up: Whether the group heals while it trains. Log lines then say "catching up", not "healing".
        """
        self._doing, self._done = ("catching up", "received") if is_catching_up else ("healing", "healed")
        self._settled_s = settled_s
        self._ranks: dict[int, _RankHeal] = {}
        self._finished: dict[int, tuple[str, int]] = {}  # by rank: process and number of the last finished heal
        self._aborted: HealStatus | None = None
        self._over_at: float | None = None
        self._logged: tuple[str, int] | None = None  # source and step of the heal in the last log line
        self._logged_at = 0.0

    def add_report(self, group_rank: int, process: str, heal: HealProgress | None, at: float) -> None:
        """Record a rank's report.

        Args:
            group_rank: The reporting rank.
            process: Identifies the rank's process. It changes at every start.
            heal: The rank's heal, or None if the rank is not healing.
            at: Time of the report.
        """
        known = self._ranks.get(group_rank)
        if heal is None:
            self._abort_heal(group_rank, at)
        elif self._finished.get(group_rank) == (process, heal.number):
            pass
        elif known is not None and known.is_continued_by(process, heal):
            known.update(heal, at)
        else:
            self._begin_heal(group_rank, _RankHeal(process, heal, at))
        if heal is not None and heal.is_over:
            self._finished[group_rank] = (process, heal.number)
        self._over_at = None if self._under_way() or not self._ranks else at if self._over_at is None else self._over_at

    def retain_ranks(self, group_ranks: Container[int], at: float) -> None:
        """Abort the unfinished heals of ranks that are not in `group_ranks`, because their processes have exited."""
        for group_rank in [rank for rank in self._ranks if rank not in group_ranks]:
            self.add_report(group_rank, "", None, at)

    def _begin_heal(self, group_rank: int, rank: _RankHeal) -> None:
        # A heal to a later step replaces an earlier heal, finished or not.
        if all(rank.heal.step > other.heal.step for other in self._ranks.values()):
            self._ranks.clear()
            self._aborted = None
        self._ranks[group_rank] = rank

    def _abort_heal(self, group_rank: int, at: float) -> None:
        # A finished heal is kept until the heal of the group ends. An unfinished heal has failed.
        known = self._ranks.get(group_rank)
        if known is not None and not known.heal.is_over:
            self._aborted = self.status(at)
            del self._ranks[group_rank]

    def status(self, now: float) -> HealStatus | None:
        """Return the group's heal, or None if no rank is healing."""
        under_way = self._under_way()
        return self._sum_up(under_way, now) if under_way else None

    def next_line(self, now: float) -> str:
        """Return the next log line that is due, or an empty string. Call this until the result is empty."""
        status, logged = self.status(now), self._logged
        if status is None:
            return self._end_line(now)
        if logged != (status.source, status.step):
            self._logged, self._logged_at = (status.source, status.step), now
            return f"{self._doing} from {status.source} at step {status.step}"
        if now < self._logged_at + LOGGED_EVERY_S:
            return ""
        self._logged_at = now
        return status.text

    def next_at(self, now: float) -> float | None:
        """Return when to call next_line() again, or None if there is no heal."""
        if self._under_way():
            return now if self._logged is None else self._logged_at + LOGGED_EVERY_S
        if self._over_at is not None:
            return self._over_at + self._settled_s
        return None if self._logged is None else now

    def _end_line(self, now: float) -> str:
        if self._aborted is None and self._over_at is not None and now < self._over_at + self._settled_s:
            return ""
        broken = self._aborted
        over = self._sum_up(list(self._ranks.values()), now) if self._ranks else None
        self._ranks.clear()
        self._logged = self._aborted = self._over_at = None
        if broken is not None:
            return f"the heal from {broken.source} at step {broken.step} broke off after {_far(broken)}"
        if over is None:
            return ""
        rate = f" ({_amount(over.received / over.seconds)}/s)" if over.seconds > 0 else ""
        spent = f"{_amount(over.received)} in {span(over.seconds)}{rate}"
        return f"{self._done} from {over.source} at step {over.step}: {spent}"

    def _under_way(self) -> list[_RankHeal]:
        return [rank for rank in self._ranks.values() if not rank.heal.is_over]

    def _sum_up(self, under_way: list[_RankHeal], now: float) -> HealStatus:
        step = max(rank.heal.step for rank in under_way)
        ranks = [rank for rank in self._ranks.values() if rank.heal.step == step]
        heals = [rank.heal for rank in ranks]
        totals = [heal.total for heal in heals]
        rates = [rate for rank in under_way if (rate := rank.rate(now)) is not None]
        left_s = [rank.left_s(now) for rank in under_way]
        names = sorted({heal.source for heal in heals})
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        status = HealStatus(
            source=", ".join(names[:NAMES_SHOWN]) + more,
            step=step,
            received=min(MAX_COUNT, sum(heal.received for heal in heals)),
            total=None if None in totals else min(MAX_COUNT, sum(filter(None, totals))),
            seconds=max(heal.seconds for heal in heals),
            bytes_per_s=min(MAX_COUNT, round(sum(rates))) if rates else None,
            left_s=None if None in left_s else max(filter(None, left_s), default=0.0),
            still_s=min(MAX_SECONDS, max(max(0.0, now - rank.moved_at) for rank in under_way)),
            text="",
        )
        return replace(status, text=f"{self._doing} from {status.source}: {', '.join(_words(status))}")


def _words(status: HealStatus) -> Iterable[str]:
    yield _far(status)
    if status.still_s >= STILL_SHOWN_S:
        yield f"nothing for {span(status.still_s)}"
        return
    if status.bytes_per_s is not None:
        yield f"{_amount(status.bytes_per_s)}/s"
    if status.left_s is not None:
        yield f"{span(status.left_s)} left"


def _far(status: HealStatus) -> str:
    """Format the amount received, for example 1.2 of 4.0 GiB."""
    if status.total is None:
        return _amount(status.received)
    unit = _unit(status.total)
    return f"{_number(status.received, unit)} of {_number(status.total, unit)} {_UNITS[unit]}"


def _amount(nbytes: float) -> str:
    unit = _unit(nbytes)
    return f"{_number(nbytes, unit)} {_UNITS[unit]}"


def _unit(nbytes: float) -> int:
    return next((unit for unit in range(len(_UNITS) - 1, 0, -1) if nbytes >= 1024**unit), 0)


def _number(nbytes: float, unit: int) -> str:
    value = nbytes / 1024**unit
    return f"{value:.0f}" if unit == 0 or (value >= 10 and unit <= 2) else f"{value:.1f}"
