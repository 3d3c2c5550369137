"""Candidates around one store in the simulator's world. Clocks drift, requests and answers are late, twice or lost,
processes are stopped for a while, and the store is away."""

from collections.abc import Callable
from typing import Any

from lighthouse.store import leadership
from lighthouse.store.election import LeadershipDriver, Request
from lighthouse.store.leadership import CandidateConfig, Leader
from tests.simulation.quorums.two_lighthouses import TTL_S, Etcd
from tests.simulation.world import Process, Timers, World

LOOKED_AT_EVERY_S = 0.02


class Racer(Process):
    """A candidate's process. `loss`: the share of its requests, and of the answers, that are lost."""

    def __init__(self, world: World, store: Etcd, name: str, loss: float, terms: list[int]) -> None:
        super().__init__(world, name, name)
        self.store, self.loss, self.terms = store, loss, terms
        self.config = CandidateConfig(name, TTL_S)
        self.driver = LeadershipDriver(self.config, Timers(self), self)
        self.driver.tick()

    @property
    def may_act(self) -> bool:
        return self.driver.refusal() is None

    def send(self, request: Request) -> None:
        if self.world.random.random() >= self.loss:
            self._travel(self.store, self._arrive, request)
        if not isinstance(request, leadership.RevokeLease):
            failed = leadership.RequestFailed(request.number, "no answer")
            self.after(self.config.request_timeout_s / self.rate, self.driver.feed, failed)

    def _arrive(self, request: Request) -> None:
        if self.store.is_stopped:
            return
        answer: Any = self.store.handle(request, Leader(self.name, self.name, "", 0))
        if isinstance(request, leadership.LoadRecords):
            answer = leadership.RecordsLoaded(request.number)
        draw = self.world.random
        if answer is not None and draw.random() >= self.loss:
            for _ in range(2 if draw.random() < 0.05 else 1):
                self._travel(self, self.driver.feed, answer)

    def _travel(self, to: Process, act: Callable[..., None], *args: object) -> None:
        self.world.at(self.world.now + self.delay_s(), to, act, *args)

    def delay_s(self) -> float:
        draw = self.world.random
        return draw.uniform(0.001, 0.01) if draw.random() < 0.8 else draw.uniform(0, 4)

    def leadership_began(self, term: int, revision: int) -> None:
        self.terms.append(term)

    def leadership_ended(self, reason: str) -> None: ...

    def leader_changed(self, leader: Leader | None) -> None: ...


class Race:
    """Two or three candidates under drawn faults, or without any. `terms`: of the leaderships that have begun."""

    def __init__(self, seed: int, *, has_faults: bool = True) -> None:
        self.world = World(seed)
        draw = self.world.random
        self.store = Etcd(self.world, lambda record, author: None)
        loss = draw.choice((0.0, 0.05, 0.3)) if has_faults else 0.0
        self.terms: list[int] = []
        names = "abc"[: draw.choice((2, 2, 3))]
        self.racers = [Racer(self.world, self.store, name, loss, self.terms) for name in names]
        if has_faults:
            self._disturb()
        self._look()

    def _disturb(self) -> None:
        draw = self.world.random
        match draw.randrange(4):
            case 0 | 1:
                draw.choice(self.racers).pause(draw.choice((0.3, 1.5, 2.5, 3.5, 8.0)))
            case 2:
                self.store.is_stopped = True
                self.world.after(draw.choice((0.5, 2.5, 6.0)), setattr, self.store, "is_stopped", False)
            case _:
                pass
        self.world.after(draw.uniform(0.5, 8), self._disturb)

    def _look(self) -> None:
        """One that may act is the one that the store names; so there are never two."""
        acting, leader = self.acting, self.store.leader
        assert acting in ([], [leader.candidate if leader is not None else None]), (
            f"at {self.world.now:.3f} s {acting} may act, and the store names {leader}"
        )
        self.world.after(LOOKED_AT_EVERY_S, self._look)

    @property
    def acting(self) -> list[str]:
        return [racer.name for racer in self.racers if racer.may_act]

    def run(self, until: float = 90.0) -> None:
        self.world.run(until)
