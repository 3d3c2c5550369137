"""How much of something may be used: so much at once, and so much a second after that. No I/O."""


class TokenBucket:
    """`now` is any clock that does not go back."""

    __slots__ = ("_at", "_left", "at_once", "per_s")

    def __init__(self, per_s: float, at_once: float) -> None:
        self.per_s = per_s
        self.at_once = at_once
        self._left = at_once
        self._at = 0.0

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Whether there was so much left; else nothing is taken."""
        left = self._left + (now - self._at) * self.per_s
        left = min(left, self.at_once)
        if left < amount:
            return False
        self._left, self._at = left - amount, now
        return True

    def is_full(self, now: float) -> bool:
        return self._left + (now - self._at) * self.per_s >= self.at_once
