"""When the lighthouse is told where the ranks of the group are. No I/O."""

from collections.abc import Callable

from lighthouse_protocol.messages.progress import GroupView, RankView

TOLD_S = 0.9  # less than the usual heartbeat interval
REPEATED_S = 4.0  # less than stall.SILENT_S


class ProgressReporter:
    """When the lighthouse is told where the ranks are: with a heartbeat, if that has changed, and else often enough to
    show that they live. No step costs a message."""

    def __init__(self, view: Callable[[float], GroupView]) -> None:
        self._view = view
        self._told: GroupView | None = None
        self._told_at = 0.0

    def begin(self) -> None:
        """To a lighthouse that knows nothing."""
        self._told = None

    def news(self, now: float) -> GroupView | None:
        if self._told is not None and now < self._told_at + TOLD_S:
            return None
        view = self._view(now)
        before = self._told.ranks if self._told is not None else ()
        is_same = [_place(rank) for rank in view.ranks] == [_place(rank) for rank in before]
        if is_same and (not view.ranks or now < self._told_at + REPEATED_S):
            return None
        self._told, self._told_at = view, now
        return view


def _place(rank: RankView) -> tuple[object, ...]:
    """What of it does not change with time alone."""
    sample = rank.sample
    phases = [(phase.name, phase.done) for phase in sample.phases]
    heal = sample.heal and (sample.heal.number, sample.heal.received, sample.heal.is_over)
    where = sample.collective, sample.calls, sample.waits_for, sample.at, heal
    return rank.name, rank.rank_incarnation, sample.step, phases, where
