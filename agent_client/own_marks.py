"""What the Agent's own thread does for this rank: the collective that it is in, the quorum or the peers that it waits
for, the state that it heals by. The script's thread may compute beside it, or wait for it.

One thread marks; a mark replaces one tuple, and words are made when somebody reads.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, TypeAlias

from protos.progress import MAX_LABEL_CHARS, MAX_NAME_CHARS, Collective

Shape: TypeAlias = "str | Sequence[int]"


class Done(NamedTuple):
    """As it was read. `waits_for` others, or is `busy` with something of its own: at most one of the two is told."""

    collective: Collective | None
    waits_for: str
    busy: str
    since: float


class OwnMarks:
    """`clock`: seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.collective: tuple[Inside | None, bool, float] = (None, False, clock())
        self.act: tuple[Act | None, float] = (None, clock())

    def read(self) -> Done:
        (inside, is_inside, moved_at), (act, since) = self.collective, self.act
        collective = None if inside is None else inside.told(is_inside)
        waits_for = act.what if act is not None and act.is_wait else ""
        busy = act.what if act is not None and not act.is_wait else ""
        return Done(collective, waits_for, busy, max(moved_at, since))


class Inside:
    """The block in which the rank is in a collective."""

    __slots__ = ("marks", "number", "operation", "quorum_id", "shape", "within_group")

    def __init__(
        self, marks: OwnMarks, quorum_id: int, number: int, operation: str, shape: Shape, within_group: bool
    ) -> None:
        self.marks, self.quorum_id, self.number = marks, quorum_id, number
        self.operation, self.shape, self.within_group = operation, shape, within_group

    def __enter__(self) -> None:
        self.marks.collective = (self, True, self.marks.clock())

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.marks.collective = (self, False, self.marks.clock())

    def told(self, is_inside: bool) -> Collective:
        shape = self.shape if isinstance(self.shape, str) else "x".join(map(str, self.shape))
        return Collective(
            self.quorum_id,
            self.number,
            self.operation[:MAX_NAME_CHARS],
            shape[:MAX_LABEL_CHARS],
            is_inside,
            self.within_group,
        )


class Act:
    """The block in which it waits for `what`, or does that."""

    __slots__ = ("is_wait", "marks", "what")

    def __init__(self, marks: OwnMarks, what: str, *, is_wait: bool) -> None:
        self.marks, self.what, self.is_wait = marks, what[:MAX_NAME_CHARS], is_wait

    def __enter__(self) -> None:
        self.marks.act = (self, self.marks.clock())

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.marks.act = (None, self.marks.clock())
