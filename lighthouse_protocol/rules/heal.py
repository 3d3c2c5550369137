"""How far a replica group has healed, how fast, when it is likely to end, and which lines a log has of it. No I/O.

1. A rank's rate is that of its last RATE_OVER_S. While nothing arrives it falls to zero, and no end is foretold.
2. A heal that begins anew (another one, another process, or fewer bytes: its source was another) has a rate of its own.
3. The ranks of a group heal side by side: their bytes and rates are added up. What is left is that of the slowest rank,
   and not known while that of one rank is not. A rank that is done counts until all are.
4. A log has a line when a heal begins, one every SAID_EVERY_S, and one at its end: what it cost, or that it broke off.

All moments are of the reader's clock; reports tell ages and bytes, so no clock is shared.
"""

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from lighthouse_protocol.limits import MAX_COUNT, MAX_SECONDS
from lighthouse_protocol.messages.progress import HealProgress
from lighthouse_protocol.messages.status import HealStatus
from lighthouse_protocol.rules.stall import span

RATE_OVER_S = 10.0
RATE_AFTER_S = 0.5
KEPT_EVERY_S = 0.25
"""Reports that come faster take each other's place."""
FRESH_S = 2.0
"""A report that is not older stands for the present: between two of them the rate does not fall."""
STILL_SHOWN_S = 5.0
"""A slow link brings a piece of a state in this time."""
SAID_EVERY_S = 10.0
SETTLED_S = 1.0
"""So much later than its first rank another one of the group may report that it heals, or has healed."""
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

    def take(self, heal: HealProgress, at: float) -> None:
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
        """Bytes per second; None: not known yet."""
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


@dataclass(slots=True)
class _Said:
    """Of the heal that goes on: `of` tells it from another one."""

    of: tuple[str, int]
    at: float


class GroupHeal:
    """Of one replica group, or of one rank. Moments never go back."""

    def __init__(self, settled_s: float = SETTLED_S, *, is_beside: bool = False) -> None:
        """`settled_s`: how long after the last report of a heal the group's counts as over. `is_beside`: it goes on
        beside the steps, and lines say so."""
        self._doing, self._done = ("catching up", "received") if is_beside else ("healing", "healed")
        self._settled_s = settled_s
        self._ranks: dict[int, _RankHeal] = {}
        self._told: dict[int, tuple[str, int]] = {}  # by rank: the process and the number of its last heal that is over
        self._broken: HealStatus | None = None
        self._over_at: float | None = None
        self._said: _Said | None = None

    def take(self, group_rank: int, process: str, heal: HealProgress | None, at: float) -> None:
        """What that rank reports; `process` is new at every start. None: it does not heal."""
        known = self._ranks.get(group_rank)
        if heal is None:
            self._end(group_rank, at)
        elif self._told.get(group_rank) == (process, heal.number):
            pass
        elif known is not None and known.is_continued_by(process, heal):
            known.take(heal, at)
        else:
            self._begin(group_rank, _RankHeal(process, heal, at))
        if heal is not None and heal.is_over:
            self._told[group_rank] = (process, heal.number)
        self._over_at = None if self._under_way() or not self._ranks else at if self._over_at is None else self._over_at

    def keep(self, group_ranks: Container[int], at: float) -> None:
        """The processes of all other ranks have ended."""
        for group_rank in [rank for rank in self._ranks if rank not in group_ranks]:
            self.take(group_rank, "", None, at)

    def _begin(self, group_rank: int, rank: _RankHeal) -> None:
        """A heal to a later step leaves an earlier one behind, however that ended."""
        if all(rank.heal.step > other.heal.step for other in self._ranks.values()):
            self._ranks.clear()
            self._broken = None
        self._ranks[group_rank] = rank

    def _end(self, group_rank: int, at: float) -> None:
        """One that is over stays until its group's is; one that is not has failed."""
        known = self._ranks.get(group_rank)
        if known is not None and not known.heal.is_over:
            self._broken = self.status(at)
            del self._ranks[group_rank]

    def status(self, now: float) -> HealStatus | None:
        """None: no rank heals."""
        under_way = self._under_way()
        return self._sum_up(under_way, now) if under_way else None

    # -- lines

    def news(self, now: float) -> str:
        """The line that is due; empty: none is. To be asked again until it is empty."""
        status, said = self.status(now), self._said
        if status is None:
            return self._end_line(now)
        if said is None or said.of != (status.source, status.step):
            self._said = _Said((status.source, status.step), now)
            return f"{self._doing} from {status.source} at step {status.step}"
        if now < said.at + SAID_EVERY_S:
            return ""
        said.at = now
        return status.text

    def next_at(self, now: float) -> float | None:
        """When the next line may be due; None: no heal is known."""
        if self._under_way():
            return now if self._said is None else self._said.at + SAID_EVERY_S
        if self._over_at is not None:
            return self._over_at + self._settled_s
        return None if self._said is None else now

    def _end_line(self, now: float) -> str:
        if self._broken is None and self._over_at is not None and now < self._over_at + self._settled_s:
            return ""
        broken = self._broken
        over = self._sum_up(list(self._ranks.values()), now) if self._ranks else None
        self._ranks.clear()
        self._said = self._broken = self._over_at = None
        if broken is not None:
            return f"the heal from {broken.source} at step {broken.step} broke off after {_far(broken)}"
        return self._healed_line(over) if over is not None else ""

    def _healed_line(self, over: HealStatus) -> str:
        rate = f" ({_amount(over.received / over.seconds)}/s)" if over.seconds > 0 else ""
        spent = f"{_amount(over.received)} in {span(over.seconds)}{rate}"
        return f"{self._done} from {over.source} at step {over.step}: {spent}"

    # -- sums

    def _under_way(self) -> list[_RankHeal]:
        return [rank for rank in self._ranks.values() if not rank.heal.is_over]

    def _sum_up(self, under_way: list[_RankHeal], now: float) -> HealStatus:
        step = max(rank.heal.step for rank in under_way)
        ranks = [rank for rank in self._ranks.values() if rank.heal.step == step]
        heals = [rank.heal for rank in ranks]
        totals = [heal.total for heal in heals]
        rates = [rate for rank in under_way if (rate := rank.rate(now)) is not None]
        left_s = [rank.left_s(now) for rank in under_way]
        status = HealStatus(
            source=_named(sorted({heal.source for heal in heals})),
            step=step,
            received=min(MAX_COUNT, sum(heal.received for heal in heals)),
            total=None if None in totals else min(MAX_COUNT, sum(filter(None, totals))),
            seconds=max(heal.seconds for heal in heals),
            bytes_per_s=min(MAX_COUNT, round(sum(rates))) if rates else None,
            left_s=None if None in left_s else max(filter(None, left_s), default=0.0),
            still_s=min(MAX_SECONDS, max(max(0.0, now - rank.moved_at) for rank in under_way)),
            text="",
        )
        return _with_text(status, self._doing)


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _with_text(status: HealStatus, doing: str) -> HealStatus:
    return replace(status, text=f"{doing} from {status.source}: {', '.join(_words(status))}")


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
    """1.2 of 4.0 GiB."""
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
