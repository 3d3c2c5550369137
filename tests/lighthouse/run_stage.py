"""A run's machine among its ranks: what it says is carried to them, and both are checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lighthouse.job.events import (
    Completed,
    GenerationFormed,
    GenerationSent,
    IncidentChanged,
    Interrupted,
    RankJoined,
    RankLost,
    RankRefused,
    RankReported,
    RecordChanged,
    RecordDue,
    Resumed,
    RunEffect,
    RunEvent,
    SessionEnded,
    Stopped,
    SupervisorMessage,
)
from lighthouse.job.records import RunConfig, RunRecord, dump_run, parse_run
from lighthouse.job.restarts import RunMachine
from lighthouse_protocol.messages.run import (
    CloseReport,
    FailureReport,
    FinishReport,
    Generation,
    RankHeartbeat,
    RankHello,
    RankId,
    ReadyReport,
    RunCounters,
    RunStopped,
    RunTerms,
)
from lighthouse_protocol.refusals import LighthouseError


@dataclass(eq=False)
class Worker:
    """A process. `held`: the generation that it was told last; `runs`: it is active in it, and has not stopped."""

    rank: RankId
    attempt: int = 0
    host: str = ""
    session: int | None = None
    held: Generation | None = None
    generation: int | None = None
    is_ready: bool = False
    is_alive: bool = True
    runs: bool = False
    is_done: bool = False
    numbers: list[int] = field(default_factory=list)
    refusals: list[LighthouseError] = field(default_factory=list)
    stop: RunStopped | None = None

    @property
    def slot(self) -> int:
        return self.rank.slot

    @property
    def place(self) -> int | None:
        """RANK; None: a spare, or told nothing."""
        active = self.held.active if self.held and self.runs else ()
        return active.index(self.rank) if self.rank in active else None

    @property
    def number(self) -> int | None:
        return self.numbers[-1] if self.numbers else None

    def hear(self, generation: Generation) -> None:
        known = self.numbers[-1] if self.numbers else -1
        assert generation.number >= known, "a number went back"
        if generation.number > known:
            self.numbers.append(generation.number)
        self.held = generation
        if self.rank in generation.active:
            assert self.is_ready or self.generation == generation.number, "told while it runs"
            self.runs, self.is_ready, self.generation = True, False, generation.number

    def interrupt(self, number: int) -> None:
        if self.generation == number:
            self.runs = False


class RunStage:
    """`obedient`: who is interrupted is ready at once."""

    def __init__(
        self, world_size: int = 4, *, obedient: bool = True, wall_offset_s: float = 0.0, **terms: object
    ) -> None:
        self.terms = RunTerms(world_size=world_size, **terms)  # pyright: ignore[reportArgumentType]
        self.config = RunConfig(wall_offset_s=wall_offset_s, run="r")
        self.machine = RunMachine(self.config)
        self.obedient = obedient
        self.now = 0.0
        self.record = RunRecord()
        self.workers: dict[int, Worker] = {}
        self.named: dict[int, Generation] = {}
        self.completed: list[int] = []
        self.finished: set[tuple[RankId, int]] = set()
        self.is_down = self.is_closed = False
        self.stale: list[int] = []  # streams of dead processes whose end was not read yet
        self._numbers = 0

    # -- what ranks do

    def start(
        self, *slots: int, attempt: int | None = None, stream: bool = True, host: str = "", unit: str = ""
    ) -> None:
        """New processes, ready at once; their predecessors are gone without a word."""
        for slot in slots:
            self.spawn(slot, attempt=attempt, host=host, unit=unit)
            self.enter(slot, stream=stream)
            self.ready(slot)
        self.obey()

    def spawn(self, slot: int, *, attempt: int | None = None, host: str = "", unit: str = "") -> Worker:
        self._numbers += 1
        old = self.workers.get(slot)
        if old is not None:
            old.is_alive = False
            self.stale += [] if old.session is None else [old.session]
        after = 0 if old is None else old.attempt + (self.terms.stride > 1)
        incarnation = f"{unit}.{unit}{after}" if unit else f"i{self._numbers}"
        worker = Worker(RankId(slot, incarnation), after if attempt is None else attempt, host)
        if old is not None and old.numbers:  # its supervisor knows
            worker.numbers.append(old.numbers[-1])
        self.workers[slot] = worker
        return worker

    def enter(self, slot: int, *, stream: bool = True) -> None:
        worker = self.workers[slot]
        self._numbers += 1
        self.stale += [] if worker.session is None else [worker.session]
        worker.session = self._numbers if stream else None
        seen = worker.numbers[-1] if worker.numbers else None
        entry = RankHello(
            worker.rank,
            self.terms,
            attempt=worker.attempt,
            host=worker.host,
            generation=worker.generation,
            is_ready=worker.is_ready,
            seen=seen,
        )
        self.feed(RankJoined(entry, worker.session))

    def ready(self, *slots: int) -> None:
        for slot in slots:
            worker = self.workers[slot]
            if worker.is_done:
                continue
            worker.runs, worker.is_ready = False, True
            self.feed(RankReported(worker.rank, ReadyReport(worker.generation)))

    def fail(self, slot: int, reason: str = "ValueError") -> None:
        worker = self.workers[slot]
        assert worker.generation is not None
        self.feed(RankReported(worker.rank, FailureReport(worker.generation, reason)))
        self.obey()

    def finish(self, *slots: int) -> None:
        for slot in slots:
            worker = self.workers[slot]
            assert worker.generation is not None
            self.feed(RankReported(worker.rank, FinishReport(worker.generation)))

    def close(self, slot: int) -> None:
        self.is_closed |= self.terms.is_elastic
        self.feed(RankReported(self.workers[slot].rank, CloseReport()))

    def kill(self, *slots: int) -> None:
        for slot in slots:
            worker = self.workers[slot]
            worker.is_alive = worker.runs = worker.is_ready = False
            if worker.session is not None:
                session, worker.session = worker.session, None
                self.feed(SessionEnded(session))
        self.obey()

    def vanish(self, slot: int) -> None:
        """Killed; the end of its stream is not read yet."""
        worker = self.workers[slot]
        worker.is_alive = worker.runs = worker.is_ready = False
        self.stale += [] if worker.session is None else [worker.session]
        worker.session = None

    def read_ends(self) -> None:
        stale, self.stale = self.stale, []
        for session in stale:
            self.feed(SessionEnded(session))

    def break_connection(self, slot: int) -> None:
        """The process lives, and will enter again."""
        session, self.workers[slot].session = self.workers[slot].session, None
        if session is not None:
            self.feed(SessionEnded(session))

    def report_dead(self, slot: int) -> None:
        """By its supervisor."""
        self.workers[slot].is_alive = self.workers[slot].runs = False
        self.feed(RankLost(self.workers[slot].rank, "killed by signal 9"))
        self.obey()

    def beat(self, *slots: int, step: int = 0) -> None:
        for slot in slots:
            self.feed(RankReported(self.workers[slot].rank, RankHeartbeat(step)))

    def obey(self) -> None:
        """Whoever was interrupted has stopped, and is ready."""
        while self.obedient and (stopped := [w for w in self.workers.values() if self._is_stopped(w)]):
            self.ready(*(worker.slot for worker in stopped))

    def _is_stopped(self, worker: Worker) -> bool:
        is_idle = worker.is_alive and not worker.runs and not worker.is_ready
        return is_idle and worker.generation is not None and worker.stop is None and not self.is_down

    # -- time and the lighthouse

    def wait(self, seconds: float) -> None:
        """The driver's ticks happen in time."""
        until = self.now + seconds
        while not self.is_down and (due := self.machine.deadline(self.now)) is not None and due <= until:
            assert due > self.now
            self.now = due
            self.perform(list(self.machine.tick(self.now)))
            self.obey()
        self.now = until

    def kill_lighthouse(self) -> None:
        self.is_down = True
        self.stale = []
        for worker in self.workers.values():
            worker.session = None

    def start_lighthouse(self) -> None:
        """On its records alone."""
        self.is_down = False
        record = parse_run(dump_run(self.record))
        assert record == self.record
        self.machine = RunMachine(self.config, record=record, now=self.now)
        for slot, worker in sorted(self.workers.items()):
            if worker.is_alive:
                self.enter(slot)
        self.obey()

    # -- to the machine

    def feed(self, event: RunEvent) -> None:
        match event:
            case RankReported(rank, FinishReport(generation)):
                self.finished.add((rank, generation))
            case _:
                pass
        if not self.is_down:
            self.perform(list(self.machine.handle(event, self.now)))

    def perform(self, effects: list[RunEffect]) -> None:
        for effect in effects:
            self.carry(effect)
        assert self.machine.tick(self.now) == [], "a tick at the same moment finds nothing left to do"
        due = self.machine.deadline(self.now)
        assert due is None or due > self.now

    def carry(self, effect: RunEffect) -> None:
        match effect:
            case RecordDue(record):
                self.record = record
            case GenerationFormed(generation, spares):
                self.check_left_out(generation, spares)
                self.check(generation)
                for rank in (*generation.active, *spares):
                    self._tell(rank, generation)
            case GenerationSent(rank, generation):
                self.check(generation)
                self._tell(rank, generation)
            case Interrupted(number, _, ranks):
                for rank in ranks:
                    self.worker(rank).interrupt(number)
            case RankRefused(rank, error):
                self.worker(rank).refusals.append(error)
            case Stopped(stop, ranks):
                for rank in ranks:
                    self.worker(rank).stop = stop
                    self.worker(rank).runs = False
            case Completed(number, ranks, is_new):
                assert self.is_closed or {(rank, number) for rank in self.named[number].active} <= self.finished
                self.completed += [number] if is_new else []
                for rank in ranks:
                    self._end(self.worker(rank))
            case RecordChanged() | IncidentChanged():
                self.record = self.machine.make_record(self.now)
            case Resumed() | SupervisorMessage():
                pass

    def _end(self, worker: Worker) -> None:
        """It was told that all is done: its process ends."""
        worker.is_done, worker.is_alive, worker.runs, worker.is_ready = True, False, False, False
        self.stale += [] if worker.session is None else [worker.session]
        worker.session = None

    def check_left_out(self, generation: Generation, spares: tuple[RankId, ...]) -> None:
        """Who is alive is left out by a majority only; of an elastic run, by those that are enough."""
        before = self.named[max(self.named)].active if self.named else ()
        ready = {rank.slot for rank in (*generation.active, *spares)}
        left_out = [
            rank for rank in before if rank.slot not in ready and self.machine.generations.ranks.find_live(rank)
        ]
        stayed = sum(rank.slot in ready for rank in before)
        needed = self.terms.min_active if self.terms.is_elastic else len(before) // 2 + 1
        assert not left_out or stayed >= needed

    def check(self, generation: Generation) -> None:
        assert self.machine.completed is None
        assert self.record.generation is not None
        assert self.record.counters.number >= generation.number, "told before it was written down"
        assert self.named.setdefault(generation.number, generation) == generation, "one number, two lists"
        assert len({rank.slot for rank in generation.active}) == len(generation.active)
        assert len(generation.active) <= self.terms.target

    def _tell(self, rank: RankId, generation: Generation) -> None:
        worker = self.worker(rank)
        if worker.is_alive:
            worker.hear(generation)

    def worker(self, rank: RankId) -> Worker:
        worker = self.workers.get(rank.slot)
        return worker if worker is not None and worker.rank == rank else Worker(rank, is_alive=False)

    # -- what is

    @property
    def counters(self) -> RunCounters:
        return self.machine.generations.restarts.counters

    @property
    def number(self) -> int:
        return self.machine.generations.current.number

    def table(self) -> tuple[int, int, int]:
        """As the documents' state diagram has it."""
        return self.counters.global_iteration, self.counters.job_restarts, self.counters.ranks_restarts

    def places(self) -> dict[int, int]:
        """RANK -> slot, of those who run."""
        return {worker.place: slot for slot, worker in self.workers.items() if worker.place is not None}

    def members(self) -> set[int]:
        """The slots of the last generation."""
        return set(self.machine.generations.current.slots)

    def running(self) -> set[int]:
        return set(self.places().values())


def refusal(effects: Sequence[RunEffect]) -> LighthouseError:
    """The only effect is that a rank is refused."""
    (effect,) = effects
    assert isinstance(effect, RankRefused)
    return effect.error


def running(world_size: int = 4, **terms: object) -> RunStage:
    """All slots have started, and run generation 0."""
    stage = RunStage(world_size, **terms)  # pyright: ignore[reportArgumentType]
    stage.start(*range(world_size))
    assert stage.number == 0
    return stage
