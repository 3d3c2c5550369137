"""When the next generation forms, and of which ranks.

1. All active ranks of the last generation that are alive are ready: at once. Lost ranks are not waited for, unless
   ranks are here that are restarted with them: these are about to die. Ranks that are alive and not ready are waited
   for until `join_timeout_s` after the wait began; then the ready ones go on if they fill at least floor(n/2)+1 of the
   n places of the last generation.
2. None of these ranks is alive, or there was no generation: it is a start. The slots that shall be active are waited
   for, until the same timeout; then floor(n/2)+1 of these n must be ready.
3. Still too few, for `return_timeout_s`: it is hopeless.
4. Of an elastic run any `min_active` ranks are enough: the wait begins when so many are ready, and at a start ends as
   soon as all that may be active are. Fewer are waited for without end.
5. After repeated failures it forms no sooner than the budget of restarts allows.
"""

import math
from collections.abc import Sequence

from lighthouse.runs.rules.assignment import Candidate, assign
from lighthouse.runs.rules.events import RunVerdict
from lighthouse.runs.rules.generation import GenerationState
from lighthouse.runs.rules.ranks import Rank, Ranks
from lighthouse_protocol.messages.run import RankId, RunCounters, RunTerms


class FormationClock:
    """Reads which ranks are here and the state of the last generation; it keeps only when each wait began, when it
    last looked, and how long the next generation is delayed."""

    def __init__(self) -> None:
        self._waits_since: float | None = None
        self._short_since: float | None = None
        self._looked_at = -math.inf
        self._delayed_until = -math.inf

    def look(self, ranks: Ranks, current: GenerationState, terms: RunTerms, now: float) -> RunVerdict:
        """Call it after each change, and whenever it `is_due`."""
        self._looked_at = now
        is_begun = len(ranks.ready) >= (terms.min_active if terms.is_elastic else 1)
        self._waits_since = _since(self._waits_since, now, is_begun and not current.stands)
        verdict = self.verdict(ranks, current, terms, now)
        self._short_since = _since(self._short_since, now, _is_short(verdict, current))
        return verdict

    def delay(self, until: float) -> None:
        """No generation forms before that."""
        self._delayed_until = until

    def is_hopeless(self, terms: RunTerms, now: float) -> bool:
        return self._short_since is not None and now >= self._short_since + terms.return_timeout_s

    def shift(self, by_s: float) -> None:
        """No rank could be heard for that long."""
        self._waits_since = None if self._waits_since is None else self._waits_since + by_s
        self._short_since = None if self._short_since is None else self._short_since + by_s

    def is_due(self, terms: RunTerms, now: float) -> bool:
        """Time alone may have changed the verdict since the last look."""
        return any(self._looked_at < moment <= now for moment in self.moments(terms))

    def moments(self, terms: RunTerms) -> list[float]:
        """When time alone may change the verdict, or make it hopeless."""
        waits = [] if self._waits_since is None else [self._waits_since + terms.join_timeout_s]
        short = [] if self._short_since is None else [self._short_since + terms.return_timeout_s]
        return [*waits, *short, self._delayed_until]

    def verdict(self, ranks: Ranks, current: GenerationState, terms: RunTerms, now: float) -> RunVerdict:
        if current.stands:
            return RunVerdict.STANDS
        if self._waits_since is None:
            return RunVerdict.WAITING_FOR_RANKS if ranks.ready else RunVerdict.NOBODY_READY
        if _is_incomplete(ranks, current, terms):
            if now < self._waits_since + terms.join_timeout_s:
                return RunVerdict.WAITING_FOR_RANKS
            if not _is_majority(ranks, current, terms):
                return RunVerdict.NO_MAJORITY
        if not choose(ranks, current, terms):
            return RunVerdict.TOO_FEW
        return RunVerdict.READY if now >= self._delayed_until else RunVerdict.BACKING_OFF


def choose(
    ranks: Ranks, current: GenerationState, terms: RunTerms, *, with_running: bool = False
) -> tuple[RankId, ...]:
    """The ranks that would be active now; `with_running`: once all that run are ready. O(n log n)."""
    candidates = (
        Candidate(
            rank.rank,
            rank.host,
            rank.is_ready or (with_running and rank.rank in current.running),
            rank.waits_since or 0.0,
        )
        for rank in ranks
    )
    return assign(candidates, current.slots, terms)


def begins_by_restart(members: Sequence[Rank], current: GenerationState, counters: RunCounters) -> bool:
    """Whether restarted processes begin it; also when numbers go on and all that is here is new: another launch.

    A supervised process is restarted if its supervisor says so, or if another one had its slot: a supervisor that was
    started again counts attempts from 0. A process that somebody started by hand is not.
    """
    new = [rank for rank in members if rank.generation is None]
    is_launch = current.generation is None and counters.number >= 0 and len(new) == len(members)
    return is_launch or any(rank.attempt > 0 or (rank.is_successor and rank.rank.is_supervised) for rank in new)


def _since(before: float | None, now: float, is_so: bool) -> float | None:
    return None if not is_so else now if before is None else before


def _is_short(verdict: RunVerdict, current: GenerationState) -> bool:
    """Too few are left of a generation, and no live rank is waited for."""
    is_lost = verdict is RunVerdict.NO_MAJORITY and not current.survivors
    return current.generation is not None and (verdict is RunVerdict.TOO_FEW or is_lost)


def _is_incomplete(ranks: Ranks, current: GenerationState, terms: RunTerms) -> bool:
    """A rank is waited for."""
    if current.survivors:
        return bool(current.running) or _is_torn(ranks, current)
    if len(ranks.ready) < terms.target:
        return True
    return not terms.is_elastic and any(slot not in ranks.ready for slot in range(terms.target))


def _is_torn(ranks: Ranks, current: GenerationState) -> bool:
    """Ranks are here that will be restarted with one that is lost. O(n)."""
    return any(rank.is_here and rank.rank.unit in current.lost_units for rank in ranks)


def _is_majority(ranks: Ranks, current: GenerationState, terms: RunTerms) -> bool:
    """O(n)."""
    if terms.is_elastic:
        return len(ranks.ready) >= terms.min_active
    if not current.survivors:
        return len(ranks.ready) >= terms.target // 2 + 1
    return sum(slot in ranks.ready for slot in current.slots) >= len(current.slots) // 2 + 1
