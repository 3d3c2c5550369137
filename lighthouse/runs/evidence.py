"""What the ranks of a run are doing, asked of each on its own stream, and told as a manager tells it of its group."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lighthouse.runs.rules.ranks import Rank
from lighthouse_protocol.messages.evidence import EvidenceAsked, RankEvidence, SelfReport, fitting
from lighthouse_protocol.messages.run import RankId
from lighthouse_protocol.messages.session import Evidence, EvidenceDone, EvidenceRequest
from lighthouse_runtime.ports import Timer, Timers

ANSWERED_WITHIN_S = 3.0
SILENT = (
    f"all of it: no answer within {ANSWERED_WITHIN_S:g} s; it is stopped, or something keeps it from running Python"
)
OUTSIDE = "process and output: they are its manager's to tell, of a rank with an Agent"

Told = Callable[[Evidence | EvidenceDone], None]


@dataclass(slots=True)
class _Look:
    """`waiting`: what is known of those that have not answered."""

    number: int
    told: Told
    began_at: float
    size: int
    waiting: dict[RankId, RankEvidence]
    limit: Timer


class RunEvidence:
    def __init__(self, timers: Timers, ask: Callable[[Iterable[RankId], EvidenceAsked], None]) -> None:
        self._timers = timers
        self._ask = ask
        self._numbers = itertools.count(1)
        self._looks: dict[int, _Look] = {}

    def look(self, request: EvidenceRequest, ranks: Iterable[Rank], told: Told) -> None:
        waiting = {
            rank.rank: RankEvidence(rank.rank.slot, rank.rank.incarnation, rank.pid, rank.host)
            for rank in ranks
            if not request.group_ranks or rank.rank.slot in request.group_ranks
        }
        number, now = next(self._numbers), self._timers.time()
        limit = self._timers.call_later(ANSWERED_WITHIN_S, self._end, number)
        self._looks[number] = _Look(request.number, told, now, len(waiting), waiting, limit)
        self._ask(waiting, EvidenceAsked(number))

    def answered(self, rank: RankId, own: SelfReport) -> None:
        look = self._looks.get(own.number)
        known = None if look is None else look.waiting.pop(rank, None)
        if look is None or known is None:
            return
        took_s = self._timers.time() - look.began_at
        said = replace(
            known,
            stacks=own.stacks,
            flight_recorder=own.flight_recorder,
            missing=(*own.missing, OUTSIDE),
            took_s=took_s,
        )
        look.told(Evidence(look.number, fitting(said, look.size)))
        if not look.waiting:
            self._end(own.number)

    def close(self) -> None:
        for number in list(self._looks):
            self._end(number)

    def _end(self, number: int) -> None:
        look = self._looks.pop(number)
        look.limit.cancel()
        for known in look.waiting.values():
            look.told(Evidence(look.number, replace(known, missing=(SILENT,))))
        look.told(EvidenceDone(look.number))
