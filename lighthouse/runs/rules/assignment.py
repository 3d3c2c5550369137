"""Which ranks are active, at which place, and which are spares: one function of (members, previous assignment, terms).

- As many as the terms allow: at most `active`, a multiple of `divisible_by`, at least `min_active`, or none.
- An active rank keeps its place, by slot: a restarted process takes its predecessor's. Spares fill the holes, the
  longest waiting first. If the world shrinks, the highest ranks move into the holes.
- At the start, when no rank was active, places go by slot.
- `hosts_together`: a host that misses one of its known slots has no active rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lighthouse_protocol.messages.run import RankId, RunTerms


@dataclass(frozen=True, slots=True)
class Candidate:
    """`waiting_since` orders the spares. One that is not `is_ready` is not chosen: its host misses it."""

    rank: RankId
    host: str = ""
    is_ready: bool = True
    waiting_since: float = 0.0


def assign(members: Iterable[Candidate], previous: Sequence[int], terms: RunTerms) -> tuple[RankId, ...]:
    """`previous[i]`: the slot that was rank i. The answer's item i is rank i; empty: too few."""
    here = _eligible(list(members), terms)
    size = _size(len(here), terms)
    if size == 0:
        return ()
    by_slot = {candidate.rank.slot: candidate.rank for candidate in here}
    veterans = [(place, by_slot.pop(slot)) for place, slot in enumerate(previous) if slot in by_slot]
    places: dict[int, RankId] = {place: rank for place, rank in veterans if place < size}
    moved = [rank for place, rank in veterans if place >= size]
    newcomers = [candidate for candidate in here if candidate.rank.slot in by_slot]
    newcomers.sort(key=lambda c: (c.waiting_since if previous else 0.0, c.rank.slot))
    fill = iter([*moved, *(candidate.rank for candidate in newcomers)])
    return tuple(places[place] if place in places else next(fill) for place in range(size))


def _size(ready: int, terms: RunTerms) -> int:
    size = min(ready, terms.target) // terms.divisible_by * terms.divisible_by
    return size if size >= terms.min_active else 0


def _eligible(members: list[Candidate], terms: RunTerms) -> list[Candidate]:
    ready = [member for member in members if member.is_ready]
    if not terms.hosts_together:
        return ready
    torn = {member.host for member in members if member.host and not member.is_ready}
    return [member for member in ready if member.host not in torn]
