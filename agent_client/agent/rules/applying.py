"""Whether a step that was committed was applied, too. No I/O.

A commit moves step and tag; the state follows when the optimizer has stepped. What comes between leaves the state torn:

1. Inside `entered` and `left` (FaultTolerantOptimizer, LocalSGD, DiLoCo, a script's own `with agent.applying()`):
   an exception.
2. In a script that steps its optimizers by itself: a registered one that has begun to step after a commit, and has
   not ended as often by the next step: an exception that the script has caught, also where it has tried again. (The
   step of a class may call that of the one it is derived from: torch tells of both.)
3. There, too: a commit after which nothing steps. That is expected only of a script whose registered optimizers have
   stepped after each commit so far and never twice: one that takes local steps, or applies by other means, does as it
   likes. A GradScaler may skip, which every rank does alike: the caller knows.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Applying:
    """`is_explicit`: the script says when it applies, so optimizers are not looked at."""

    is_explicit: bool = False
    _committed: int | None = None  # the step that was committed and not applied yet
    _under_way: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    _stepped: set[int] = field(default_factory=set[int])
    _expects: bool = False
    _takes_local_steps: bool = False
    _may_skip: bool = False

    def committed(self, step: int) -> None:
        self._committed = step
        self._under_way, self._stepped = Counter(), set()

    def entered(self) -> None:
        self.is_explicit = True

    def left(self) -> None:
        self._committed = None

    def optimizer_began(self, key: int, name: str, *, is_registered: bool) -> None:
        if self.is_explicit or not is_registered:
            return
        if key in self._stepped:
            self._takes_local_steps = True
        if self._committed is None:
            return
        self._under_way[key, name] += 1

    def optimizer_ended(self, key: int, name: str, *, is_registered: bool) -> None:
        if self.is_explicit:
            return
        self._stepped.add(key)
        if self._committed is None:
            return
        self._expects |= is_registered
        if is_registered:
            self._under_way[key, name] -= 1
        if not +self._under_way:
            self._committed = None

    def begins(self, may_skip: Callable[[], bool]) -> str:
        """A step begins: what is wrong with the last commit; empty: nothing. `may_skip` may take long: it is asked only
        where something is, and no more once it has said yes."""
        step, self._committed = self._committed, None
        if self.is_explicit or step is None:
            return ""
        for _, name in +self._under_way:
            return f"step {step} was committed, and {name}.step() began and did not end"
        if not self._expects or self._takes_local_steps:
            return ""
        self._may_skip = self._may_skip or may_skip()
        if self._may_skip:
            return ""
        return f"step {step} was committed, and no optimizer has stepped since"
