"""The numbers of a rank's collectives: the same at all ranks, since a script's order of them is. No I/O.

They are given out when the script asks for a collective, whichever thread does it later. Those over all replica groups
count from the quorum on; in between, those inside the group count by themselves: another group may have more of them.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    """`over_groups`: the number of collectives over the groups requested so far, including this one unless it is inside
    the group. `inner`: this is the n-th collective inside the group since then; 0: it is over the groups."""

    over_groups: int
    inner: int = 0


class Number(NamedTuple):
    """As reported. Each collective over the groups has two: its part inside the group comes first."""

    quorum_id: int
    number: int
    inner: int


class CollectiveIds:
    """For one thread at a time; `told` for any."""

    def __init__(self) -> None:
        self._last = Entry(0)
        self._began = (0, 0)

    @property
    def over_groups(self) -> int:
        """How many were requested."""
        return self._last.over_groups

    def over(self) -> Entry:
        """The next one over all groups."""
        self._last = Entry(self._last.over_groups + 1)
        return self._last

    def inside(self) -> Entry:
        """The next one inside the group."""
        self._last = Entry(self._last.over_groups, self._last.inner + 1)
        return self._last

    def begin(self, quorum_id: int, over_groups: int) -> None:
        """Count from `over_groups` on under that quorum: the number requested before its first step."""
        if quorum_id != self._began[0]:
            self._began = (quorum_id, over_groups)

    def told(self, entry: Entry, *, within_group: bool) -> Number:
        quorum_id, before = self._began
        number = max(0, 2 * (entry.over_groups - before))
        return Number(quorum_id, max(0, number - (within_group and not entry.inner)), entry.inner)
