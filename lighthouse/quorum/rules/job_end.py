"""When a job has ended, and which groups come too late for it.

A group has finished when it leaves its quorum by the end of its script (HoldState.LEAVING). The job has ended when a
member of the last quorum has finished and none of the others is present any more: they have finished, too, were lost,
or have drained. So scripts of different lengths end a job with the longest one.

A group is absent if it was in a quorum of the job and has not finished, or was present at the end without being in the
last quorum. After the end an absent group is late: alone, it would train the job once more from the step that it
brings. It is refused, unless

- it brings at least the step of the end (a checkpoint), or its manager was started with --continue;
- a group that is not absent is present: someone has started the job again, on purpose.

A group that has finished, or is not known, is never refused: it begins another training under this name. The next
quorum forgets the end.
"""

from collections.abc import Collection, Iterable

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.refusals import Drained

ABSENT_KEPT = 256


class JobEnd:
    """`step`: at which the job has ended; None: it has not. `absent` in the order in which the groups went."""

    def __init__(self, step: int | None = None, absent: Iterable[str] = ()) -> None:
        self.step = step
        self.absent = tuple(absent)
        self._finished: dict[str, int] = {}  # steps that are done, by member of the present quorum

    @property
    def is_near(self) -> bool:
        """A member of the present quorum has finished."""
        return self.step is None and bool(self._finished)

    def has_finished(self, replica_id: str) -> bool:
        return replica_id in self._finished

    def finish(self, replica_id: str, steps_done: int) -> None:
        """A member's script has ended."""
        self._finished[replica_id] = steps_done

    def reach(self, members: Iterable[str], present: Iterable[str]) -> None:
        """The job has ended: `members` of the last quorum have finished or are away; `present` are other groups."""
        self.step = max(self._finished.values())
        self._keep(name for name in (*self.absent, *members, *present) if name not in self._finished)

    def formed(self, before: Collection[str], members: Collection[str]) -> None:
        """A quorum of `members` follows one of `before`."""
        if self.step is None:
            away = (*self.absent, *sorted(before))
            self._keep(name for name in away if name not in members and name not in self._finished)
        else:
            self.absent = ()
        self.step, self._finished = None, {}

    def refusal(self, participant: Participant, others: Iterable[str]) -> Drained | None:
        """Why a late group gets no quorum; None: it is not late. `others`: the groups that are present, or start."""
        name, step = participant.replica_id, participant.asks_for
        if self.step is None or participant.continues or name not in self.absent or step >= self.step:
            return None
        if any(other not in self.absent for other in others):
            return None
        return Drained(
            f"the job ended at step {self.step}: all remaining groups have finished. {name} was absent at the end and "
            f"has step {step}, so it has nothing left to do. To train anyway, start it with "
            f"--continue (LIGHTHOUSE_MANAGER_CONTINUE=1), from a checkpoint of step {self.step} or later, or under "
            "another --job"
        )

    def _keep(self, names: Iterable[str]) -> None:
        self.absent = tuple(dict.fromkeys(names))[-ABSENT_KEPT:]
