"""How often something may be done: so many at once, and so many a second after that. No I/O."""

from lighthouse_protocol.refusals import LimitReached
from lighthouse_protocol.rules.token_bucket import TokenBucket


class RateLimit:
    """`what` is named in the refusal."""

    def __init__(self, what: str, per_s: float, at_once: int) -> None:
        self._what = what
        self._bucket = TokenBucket(per_s, at_once)

    def take(self, now: float) -> None:
        """Once more. Raises LimitReached, and then nothing is taken."""
        if not self._bucket.take(now):
            at_once, per_s = self._bucket.at_once, self._bucket.per_s
            raise LimitReached(
                f"{self._what}: at most {at_once:g} at once and {per_s:g} a second are taken; try again later"
            )
