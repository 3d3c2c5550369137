"""One generation from its forming to its end: which of its active ranks are alive, run, have finished.

It stands until it is broken (an active rank was lost or failed, or all have finished), or until the first of its ranks
says ready by itself: then it is advancing, and the others are waited for.
"""

from collections.abc import Iterable

from lighthouse_protocol.messages.run import Generation, RankId, RunCounters


class GenerationState:
    def __init__(
        self,
        generation: Generation | None = None,
        here: Iterable[RankId] = (),
        *,
        is_broken: bool = False,
        finished: Iterable[RankId] = (),
    ) -> None:
        """`here`: the ranks that are alive, of this generation or not."""
        self.generation = generation
        self.is_broken = is_broken
        self.is_advancing = False
        self.active = frozenset(generation.active) if generation else frozenset[RankId]()
        self.survivors = self.active.intersection(here)
        self.running = set(self.survivors)
        self.finished = set(finished)
        self._taken = frozenset(rank.slot for rank in self.active)
        self.lost_units = self._find_lost()

    @property
    def number(self) -> int:
        """-1: there was none yet."""
        return self.generation.number if self.generation else -1

    @property
    def stands(self) -> bool:
        """It runs, and no rank wants another."""
        return self.generation is not None and not self.is_broken and not self.is_advancing

    @property
    def slots(self) -> list[int]:
        """`slots[i]` is rank i."""
        return [rank.slot for rank in self.generation.active] if self.generation else []

    def begin(self, active: tuple[RankId, ...], counters: RunCounters) -> Generation:
        generation = Generation(active, counters)
        self.__init__(generation, active)
        return generation

    def has_heard(self, rank: RankId, generation: int | None) -> bool:
        """Whether a ready rank that was last active in `generation` can have left this one, or is none of it."""
        return rank not in self.active or self.is_broken or (generation is not None and generation >= self.number)

    def runs(self, rank: RankId, generation: int) -> bool:
        return generation == self.number and rank in self.running and not self.is_broken

    def can_fail(self, rank: RankId, generation: int) -> bool:
        """Also one that has said ready may: it is waited for no more, and the others are to know."""
        is_at_work = rank in self.survivors and rank not in self.finished
        return generation == self.number and is_at_work and not self.is_broken

    def is_place_of_another(self, rank: RankId) -> bool:
        """A predecessor of this process, which has finished, is what the slot stands for in this generation."""
        return rank.slot in self._taken and rank not in self.active

    def come_back(self, rank: RankId) -> None:
        """The process lives, its connection was broken: it is waited for again."""
        if rank in self.active and rank not in self.survivors:
            self.survivors |= {rank}
            self.lost_units = self._find_lost()
        self.running |= self.active & {rank}

    def ready(self, rank: RankId) -> None:
        self.running.discard(rank)
        if rank in self.active and not self.is_broken:
            self.is_advancing = True

    def lose(self, rank: RankId) -> bool:
        """Whether that breaks it."""
        self.survivors -= {rank}
        self.running.discard(rank)
        if rank not in self.active or rank in self.finished:
            return False
        self.lost_units.add(rank.unit)
        return True

    def _find_lost(self) -> set[str]:
        """Of ranks that had not finished: what restarts with them is about to die."""
        return {rank.unit for rank in self.active - self.survivors - self.finished}

    def finish(self, rank: RankId) -> bool:
        """Whether all have finished."""
        self.finished.add(rank)
        self.is_broken = len(self.finished) == len(self.active)
        return self.is_broken
