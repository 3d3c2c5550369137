"""Sources of one state in virtual time: each with a rate, what it holds, and when it dies or falls silent. Several
targets that hand on to each other what they have."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agent_client.transfer.rules.stripes import (
    Arrived,
    Ask,
    Broken,
    Cut,
    Effect,
    Event,
    LeadLost,
    Led,
    Own,
    PassedOver,
    Refused,
    StripePlan,
    Summed,
    Verified,
    shares,
)

MIB = 2**20
LATENCY_S = 0.001
SUMS_PER_S = 2000.0
SILENCE_S = 30.0


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

    target: "Transfer | None" = None
    """Gives what is here of this one alone."""
    waits_since: float | None = None

    def fails_at(self, how: str) -> float:
        return self.fails.get(how, math.inf)

    def has(self, piece: int) -> bool:
        return self.target is None or piece in self.target.verified

    def arm(self, size: int, now: float, latency_s: float = 0.0) -> None:
        """The next piece of what it was asked for."""
        rate = self.rate if now < self.fails_at("slows") else self.rate / 100
        self.waits_since = None if self.has(self.asked[0]) else now
        at = now + latency_s + size / rate if self.waits_since is None else now + self.silence_s
        if at >= self.fails_at("dies"):
            self.next_at, self.next_event = max(now + LATENCY_S, self.fails_at("dies")), Broken(self.name, "it is dead")
        elif at >= self.fails_at("silences"):
            silent_at = max(now, self.fails_at("silences"))
            self.next_at, self.next_event = silent_at + self.silence_s, Refused(self.name, "silent")
        elif self.waits_since is not None:
            self.next_at, self.next_event = at, Refused(self.name, "silent")
        else:
            self.next_at, self.next_event = at, Arrived(self.name, self.holds[self.asked[0]])


class Transfer:
    """As striped.py runs it. `log`: what happened, with its moments."""

    def __init__(
        self,
        sizes: Sequence[int],
        sources: Sequence[Source],
        deadline: float = 10_000.0,
        others: Mapping[str, range] | None = None,
        own: Sequence[bytes] = (),
    ) -> None:
        self.own = own
        self.sizes = sizes
        self.sources = {source.name: source for source in sources}
        self.plan = StripePlan(sizes, list(self.sources), deadline=deadline, silence_s=SILENCE_S, others=others or {})
        self.verified: set[int] = set()
        self.readers: list[tuple[Transfer, Source]] = []
        """Other targets, and this one as they see it."""
        self.asked_of: Counter[str] = Counter()
        """Bytes, by source."""
        self.deadline = deadline
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
            leads = [source for source in self.sources.values() if source.target is None]
            left = leads if self.lead is None else leads[leads.index(self.lead) + 1 :]
            lead = next((source for source in left if source.name not in self.plan.passed_over), None)
            if lead is None:
                return True
            self.lead, self._sums_told, self._sum_at = lead, 0, self.now + LATENCY_S
            self._tell(Led(lead.name))
        return self.plan.is_done or self.now >= self.deadline

    def seconds(self) -> float:
        assert self.run()
        return self.now

    def next_at(self) -> float:
        return min([self.plan.deadline(self.now), self._sum_at, *(it.next_at for it in self.sources.values())])

    def next(self) -> None:
        assert self.plan.deadline(self.now) > self.now
        source = min(self.sources.values(), key=lambda source: source.next_at)
        at = self.next_at()
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
        self._tell(Summed(self.lead.holds[self._sums_told - 1]))
        if self.own and self.plan.looks_at_own:
            found = self.own[self._sums_told - 1]
            if self.plan.wants_own(found):
                self.places[self._sums_told - 1] = found
            self._tell(Own(found))
        return None

    def _happen(self, source: Source) -> None:
        event = source.next_event
        assert event is not None
        source.next_at = math.inf
        if not isinstance(event, Arrived):
            source.asked = []
        elif self.plan.awaits(source.name) == source.asked[0]:
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
            if isinstance(effect, Verified):
                self._hand_on(effect.piece)
                continue
            source = self.sources[effect.source]
            match effect:
                case Ask(_, pieces, silence_s):
                    self.asked_of[source.name] += sum(self.sizes[piece] for piece in pieces)
                    assert not source.asked, "it is asked for one thing at a time"
                    assert effect.source not in self.plan.passed_over
                    assert 0 < silence_s <= self.deadline - self.now
                    source.asked, source.silence_s = list(pieces), silence_s
                    source.arm(self.sizes[pieces[0]], self.now, LATENCY_S)
                case Cut(name):
                    source.next_at, source.next_event = self.now + LATENCY_S, Broken(name, "cut off")
                case PassedOver():
                    source.asked, source.next_at = [], math.inf

    def _hand_on(self, piece: int) -> None:
        self.verified.add(piece)
        for reader, this in self.readers:
            if this.waits_since is not None and this.asked[:1] == [piece]:
                this.arm(self.sizes[piece], max(self.now, reader.now), LATENCY_S)


class Targets:
    """So many targets of one and the same state. `sources`: makes those of a target, `faults`: of a target as the
    others see it."""

    def __init__(
        self,
        sizes: Sequence[int],
        count: int,
        sources: Callable[[], Sequence[Source]],
        rate: float,
        faults: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        theirs, self.all = shares(sizes, count), list[Transfer]()
        for mine in range(count):
            others = {f"t{number}": share for number, share in enumerate(theirs) if number != mine}
            self.all.append(Transfer(sizes, sources(), others=others))
        for number, target in enumerate(self.all):
            for reader in self.all:
                if reader is not target:
                    held = Source(f"t{number}", rate, target.places, (faults or {}).get(number, {}), target=target)  # type: ignore[arg-type]
                    reader.sources[held.name] = held
                    target.readers.append((reader, held))

    def run(self) -> None:
        going = list(self.all)
        while going := [target for target in going if not target.has_ended()]:
            min(going, key=Transfer.next_at).next()

    def seconds(self) -> float:
        self.run()
        assert all(target.plan.is_done for target in self.all)
        return max(target.now for target in self.all)
