"""When the next generation forms, and of whom.

1. All active ranks of the last generation that are alive are ready: at once. Who is lost is not waited for. Who is
   alive and not ready is waited for until `join_timeout_s` after the wait began; then those who are ready go on if they
   fill at least floor(n/2)+1 of the n places of the last generation.
2. None of these ranks is alive, or there was no generation: it is a start. The slots that shall be active are waited
   for, until the same timeout; then floor(n/2)+1 of these n must be ready.
3. Too few all the same, for `return_timeout_s`: it is hopeless.
"""

from lighthouse.generation_events import AdvanceVerdict
from lighthouse.generation_life import GenerationLife
from lighthouse.ranks import Ranks
from lighthouse.spares import Candidate, assign
from protos.generation import RankId, Terms


class Advance:
    """Reads who is here and the last generation's life; of its own it has the moment when the wait began."""

    def __init__(self) -> None:
        self.waits_since: float | None = None

    def look(self, ranks: Ranks, life: GenerationLife, now: float) -> None:
        """Call it after each change."""
        if life.stands or not ranks.ready:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now

    def shift(self, by_s: float) -> None:
        if self.waits_since is not None:
            self.waits_since += by_s

    def moments(self, terms: Terms) -> list[float]:
        """When time alone may change the verdict."""
        if self.waits_since is None:
            return []
        return [self.waits_since + terms.join_timeout_s, self.waits_since + terms.return_timeout_s]

    def verdict(self, ranks: Ranks, life: GenerationLife, terms: Terms, now: float) -> AdvanceVerdict:
        if life.stands:
            return AdvanceVerdict.STANDS
        if self.waits_since is None:
            return AdvanceVerdict.NOBODY_READY
        if _is_incomplete(ranks, life, terms):
            if now < self.waits_since + terms.join_timeout_s:
                return AdvanceVerdict.WAITING_FOR_RANKS
            if not _is_majority(ranks, life, terms):
                return AdvanceVerdict.NO_MAJORITY
        return AdvanceVerdict.READY if choose(ranks, life, terms) else AdvanceVerdict.TOO_FEW

    def is_hopeless(self, verdict: AdvanceVerdict, life: GenerationLife, terms: Terms, now: float) -> bool:
        is_short = verdict is AdvanceVerdict.TOO_FEW or (verdict is AdvanceVerdict.NO_MAJORITY and not life.survivors)
        if not is_short or life.generation is None or self.waits_since is None:
            return False
        return now >= self.waits_since + terms.return_timeout_s


def choose(ranks: Ranks, life: GenerationLife, terms: Terms, *, with_running: bool = False) -> tuple[RankId, ...]:
    """Who would be active now, or, `with_running`, when those who run are ready. O(n log n)."""
    candidates = (
        Candidate(
            rank.rank,
            rank.host,
            rank.is_ready or (with_running and rank.rank in life.running),
            rank.waits_since or 0.0,
        )
        for rank in ranks
    )
    return assign(candidates, life.slots, terms)


def _is_incomplete(ranks: Ranks, life: GenerationLife, terms: Terms) -> bool:
    """Somebody is waited for."""
    if life.survivors:
        return bool(life.running)
    return len(ranks.ready) < terms.target or any(slot not in ranks.ready for slot in range(terms.target))


def _is_majority(ranks: Ranks, life: GenerationLife, terms: Terms) -> bool:
    """O(n)."""
    if not life.survivors:
        return len(ranks.ready) >= terms.target // 2 + 1
    return sum(slot in ranks.ready for slot in life.slots) >= len(life.slots) // 2 + 1
