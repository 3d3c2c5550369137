"""How often something may be done: so many at once, and so many a second after that. No I/O."""

from lighthouse_protocol.refusals import LimitReached


class RateLimit:
    """`what` is named in the refusal."""

    def __init__(self, what: str, per_s: float, at_once: int) -> None:
        self._what = what
        self._per_s = per_s
        self._at_once = at_once
        self._left = float(at_once)
        self._at = 0.0

    def take(self, now: float) -> None:
        """Once more. Raises LimitReached, and then nothing is taken."""
        left = min(float(self._at_once), self._left + (now - self._at) * self._per_s)
        if left < 1.0:
            raise LimitReached(
                f"{self._what}: at most {self._at_once} at once and {self._per_s:g} a second are taken; try again later"
            )
        self._left, self._at = left - 1.0, now
