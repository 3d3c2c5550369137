"""Ranks at places, in short words."""

from lighthouse_protocol.messages.progress import (
    STEP,
    Collective,
    OpenPhase,
    PhaseCount,
    ProgressSample,
    RankName,
    RankView,
)


def rank(
    number: int,
    *phases: OpenPhase | str,
    step: int = 1,
    still_s: float = 100.0,
    limit_s: float = 60.0,
    inside: Collective | None = None,
    left: Collective | None = None,
    waits_for: str = "",
    entered: dict[str, int] | None = None,
    group: str = "",
    beat_age_s: float = 0.0,
) -> RankView:
    """`inside`: the collective that it is in; `left`: or the last one that it was in."""
    named = tuple(OpenPhase(phase) if isinstance(phase, str) else phase for phase in phases)
    counts = dict.fromkeys((phase.name for phase in named), 1) | (entered or {})
    sample = ProgressSample(
        step=step,
        phases=(OpenPhase(STEP), *named),
        entered=tuple(map(PhaseCount._make, counts.items())),
        collective=inside or left,
        waits_for=waits_for,
        still_s=still_s,
    )
    return RankView(RankName(group, number), sample, limit_s, beat_age_s)


def all_reduce(number: int, quorum_id: int = 1, operation: str = "all_reduce", shape: str = "") -> Collective:
    return Collective(quorum_id, number, operation, shape)


def after(collective: Collective) -> Collective:
    return Collective(collective.quorum_id, collective.number, collective.operation, collective.shape, is_inside=False)
