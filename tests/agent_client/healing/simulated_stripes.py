"""Sources of one state in virtual time: each with a rate, what it holds, and when it dies or falls silent."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent_client.healing.rules.stripes import (
    ChecksumArrived,
    ConnectionLost,
    Disconnect,
    Effect,
    Event,
    LeadChosen,
    LeadLost,
    PieceArrived,
    PieceRequest,
    Refused,
    SourceRejected,
    StripePlan,
)

MIB = 2**20
LATENCY_S = 0.001
SUMS_PER_S = 2000.0
SILENCE_S = 30.0
DEADLINE = 10_000.0


@dataclass(slots=True, eq=False)
class Source:
    """`holds`: a checksum for each piece. `fails`: the moments at which it dies, falls silent ("silences"), or gets
    slow ("slows")."""

    name: str
    rate: float
    holds: Sequence[bytes]
    fails: Mapping[str, float] = field(default_factory=dict[str, float])
    asked: list[int] = field(default_factory=list[int])
    silence_s: float = 0.0
    next_at: float = math.inf
    next_event: Event | None = None

    def fails_at(self, how: str) -> float:
        return self.fails.get(how, math.inf)

    def arm(self, size: int, now: float, latency_s: float = 0.0) -> None:
        """The next piece of what it was asked for."""
        rate = self.rate if now < self.fails_at("slows") else self.rate / 100
        at = now + latency_s + size / rate
        if at >= self.fails_at("dies"):
            self.next_at, self.next_event = (
                max(now + LATENCY_S, self.fails_at("dies")),
                ConnectionLost(self.name, "it is dead"),
            )
        elif at >= self.fails_at("silences"):
            silent_at = max(now, self.fails_at("silences"))
            self.next_at, self.next_event = silent_at + self.silence_s, Refused(self.name, "silent")
        else:
            self.next_at, self.next_event = at, PieceArrived(self.name, self.holds[self.asked[0]])


class Transfer:
    """As fetch.py runs it. `log`: what happened, with its moments."""

    def __init__(self, sizes: Sequence[int], sources: Sequence[Source]) -> None:
        self.sizes = sizes
        self.sources = {source.name: source for source in sources}
        self.plan = StripePlan(sizes, list(self.sources), deadline=DEADLINE, silence_s=SILENCE_S)
        self.now = 0.0
        self.log: list[tuple[float, Event | Effect]] = []
        self.places: list[bytes | None] = [None] * len(sizes)
        self.lead: Source | None = None
        self._sums_told = 0
        self._sum_at = math.inf

    def run(self) -> bool:
        """Whether all is here."""
        while not self.has_ended():
            self.next()
        return self.plan.is_done

    def has_ended(self) -> bool:
        """Goes on with the next lead where one is needed."""
        while not self.plan.is_done and (self.lead is None or self.plan.is_over or self.plan.needs_lead):
            leads = list(self.sources.values())
            left = leads if self.lead is None else leads[leads.index(self.lead) + 1 :]
            lead = next((source for source in left if source.name not in self.plan.rejected), None)
            if lead is None:
                return True
            self.lead, self._sums_told, self._sum_at = lead, 0, self.now + LATENCY_S
            self._tell(LeadChosen(lead.name))
        return self.plan.is_done or self.now >= DEADLINE

    def seconds(self) -> float:
        assert self.run()
        return self.now

    def next(self) -> None:
        assert self.plan.deadline(self.now) > self.now
        source = min(self.sources.values(), key=lambda source: source.next_at)
        at = min(self.plan.deadline(self.now), self._sum_at, source.next_at)
        assert at < math.inf, "nothing will ever happen"
        self.now = max(self.now, at)
        if at == self._sum_at:
            self._sum()
        elif at == source.next_at:
            self._happen(source)
        else:
            self._perform(self.plan.tick(self.now))

    def _sum(self) -> None:
        assert self.lead is not None
        if self.now >= min(self.lead.fails_at("dies"), self.lead.fails_at("silences")):
            self._sum_at = math.inf
            return self._tell(LeadLost())
        self._sums_told += 1
        self._sum_at = self.now + 1 / SUMS_PER_S if self._sums_told < len(self.sizes) else math.inf
        return self._tell(ChecksumArrived(self.lead.holds[self._sums_told - 1]))

    def _happen(self, source: Source) -> None:
        event = source.next_event
        assert event is not None
        source.next_at = math.inf
        if not isinstance(event, PieceArrived):
            source.asked = []
        elif self.plan.next_piece(source.name) == source.asked[0]:
            self.places[source.asked.pop(0)] = event.checksum
            if source.asked:
                source.arm(self.sizes[source.asked[0]], self.now)
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self.log.append((self.now, event))
        self._perform(self.plan.handle(event, self.now))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self.log.append((self.now, effect))
            source = self.sources[effect.source]
            match effect:
                case PieceRequest(_, pieces, silence_s):
                    assert not source.asked, "it is asked for one thing at a time"
                    assert effect.source not in self.plan.rejected
                    assert 0 < silence_s <= DEADLINE - self.now
                    source.asked, source.silence_s = list(pieces), silence_s
                    source.arm(self.sizes[pieces[0]], self.now, LATENCY_S)
                case Disconnect(name):
                    source.next_at, source.next_event = self.now + LATENCY_S, ConnectionLost(name, "cut off")
                case SourceRejected():
                    source.asked, source.next_at = [], math.inf
