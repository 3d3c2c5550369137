"""A heal of this process, as its transfer marks it: how many bytes are here, of how many."""

from collections.abc import Callable

from lighthouse_protocol.messages.progress import MAX_LABEL_CHARS, HealProgress

KEPT_S = 15.0
"""How long a heal that is over is still reported: every reader has had it by then."""


class HealMark:
    """One thread marks, any thread reads; no lock. `clock`: seconds that never go back."""

    def __init__(self, number: int, source: str, step: int, clock: Callable[[], float]) -> None:
        self.number = number
        self.moved_at = clock()
        self._clock = clock
        self._step = step
        self._at: tuple[str, int, int | None] = (source, 0, None)
        self._began_at = self.moved_at
        self._ended_at: float | None = None
        self._has_failed = False

    def received(self, source: str, received: int, total: int) -> None:
        """So many bytes of the encoded state are here; it begins anew with another source."""
        self._at = (source, received, total)
        self.moved_at = self._clock()

    def over(self) -> None:
        """The state is here, and checked."""
        self._ended_at = self._clock()

    def failed(self) -> None:
        self._has_failed = True

    def read(self) -> HealProgress | None:
        """None: it has failed, or is over for long."""
        now, ended_at = self._clock(), self._ended_at
        if self._has_failed or (ended_at is not None and now >= ended_at + KEPT_S):
            return None
        source, received, total = self._at
        seconds = (now if ended_at is None else ended_at) - self._began_at
        return HealProgress(
            self.number, source[:MAX_LABEL_CHARS], self._step, received, total, seconds, ended_at is not None
        )
