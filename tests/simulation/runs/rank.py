"""A rank's process: the product's RankDriver on a virtual clock, its stream, and the function that it runs."""

from typing import TYPE_CHECKING, Any

from agent_client.restart.driver import RankDriver
from agent_client.restart.rules import events
from agent_client.restart.rules.events import RankConfig, RankPhase
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import GenerationFormed, KeyKind, RankHello, RankId, RunCompleted, RunStopped
from tests.simulation.runs.lighthouse import KeyAnswer, KeyRequest
from tests.simulation.runs.links import Link
from tests.simulation.world import Process, Timer

if TYPE_CHECKING:
    from tests.simulation.runs.simulation import RunSimulation
    from tests.simulation.runs.supervisor import Supervisor

KEYS_EVERY_S = 1.0
EXIT_STOPPED = 130
SIGKILLED = -9


class RankProcess(Process):
    def __init__(self, simulation: "RunSimulation", supervisor: "Supervisor", rank: RankId, attempt: int) -> None:
        super().__init__(simulation.world, f"rank{rank.slot}/{rank.incarnation}", supervisor.host)
        plan = simulation.plan
        self.simulation = simulation
        self.supervisor = supervisor
        self.rank = rank
        self.attempt = attempt
        entry = RankHello(
            rank, plan.terms, attempt, supervisor.host, simulation.world.counts["processes"], secret=supervisor.secret
        )
        simulation.world.counts["processes"] += 1
        config = RankConfig(hard_timeout_s=plan.hard_timeout_s, accept_timeout_s=plan.accept_timeout_s)
        self.machine = RankMachine(entry, config)
        self.driver = RankDriver(self.machine, DriverSide(self))
        self.link = Link(self, simulation.network, self._opened, self._heard, self._closed)
        self.running: int | None = None
        self.told: int | None = None
        self.born_at = self.world.now
        self.is_hung = False
        self._session = 0
        self._queued: list[Any] = []
        self._timer = Timer(self, self._tick)
        self.on_death.append(lambda: simulation.network.end_all(self))
        self.after(plan.boot_s, self._boot)

    @property
    def waits(self) -> bool:
        return self.machine.phase in (RankPhase.READY, RankPhase.SPARE)

    def _boot(self) -> None:
        self.driver.start()
        self.feed(events.Waiting())
        self.after(KEYS_EVERY_S, self._use_keys)

    # -- the driver

    def feed(self, event: events.RankEvent) -> None:
        self.driver.feed(event)
        self._rearm()

    def _tick(self) -> None:
        self.driver.tick()
        self._rearm()

    def _rearm(self) -> None:
        if self.is_up:
            self._timer.set(self.driver.deadline())

    # -- the stream

    def connect(self, session: int) -> "RankProcess":
        self._session, self._queued = session, []
        self.link.open(self.simulation.lighthouse)
        return self

    def cancel(self) -> None:
        self.link.close()

    def send(self, message: Any) -> None:
        if self.link.is_open:
            self.link.send(message)
        else:
            self._queued.append(message)

    def _opened(self) -> None:
        queued, self._queued = self._queued, []
        for message in queued:
            self.link.send(message)

    def _closed(self) -> None:
        self.feed(events.StreamClosed(self._session, None, self.world.random.random()))

    def _heard(self, message: Any) -> None:
        if isinstance(message, KeyAnswer):
            return None
        if isinstance(message, GenerationFormed):
            self.told = max(message.counters.number, -1 if self.told is None else self.told)
            self.simulation.checkers.heard(self.rank, message)
        return self.feed(events.MessageReceived(self._session, message))

    def _use_keys(self) -> None:
        self.after(KEYS_EVERY_S, self._use_keys)
        if self.running is None or not self.link.is_open:
            return
        name, slot = f"rank{self.world.random.randrange(3)}", self.rank.slot
        value = None if self.world.random.random() < 0.5 else f"{self.rank.incarnation} at {self.world.now}".encode()
        self.link.send(KeyRequest(self.running, KeyKind.ITERATION, name, value, slot, self.supervisor.secret))

    # -- the function

    def run(self, run: events.Run) -> None:
        number, place, world_size = run.counters.number, run.rank, run.world_size
        self.running = number
        self.log(f"runs {number} as rank {place} of {world_size}")
        self.simulation.checkers.runs(self.rank, number, place, world_size)
        self.simulation.work.begin(self, number, place, world_size)

    def interrupt(self, reason: str) -> None:
        if self.running is None or self.is_hung:
            return
        self.running = None
        self.after(self.simulation.plan.interrupt_s * self.world.random.uniform(0.2, 1.5), self._raised, "interrupted")

    def _raised(self, reason: str) -> None:
        self.feed(events.Raised(reason))
        if self.machine.outcome is not None:
            return self.end(events.Ended(self.machine.outcome))
        return self.after(0.001, self.feed, events.Waiting())

    def stepped(self, step: int) -> None:
        self.feed(events.StepDone(step))

    def return_from(self, number: int) -> None:
        if self.running == number:
            self.running = None
            self.log(f"returns from {number}")
            self.feed(events.Returned())

    def fail(self, reason: str) -> None:
        self.running = None
        self._raised(reason)

    def hang(self, for_s: float) -> None:
        """Hang in C code, so that an interruption must wait."""
        self.is_hung = True
        self.after(for_s, setattr, self, "is_hung", False)

    # -- its end

    def end(self, ended: events.Ended) -> None:
        """Exit when the function has ended."""
        outcome = ended.outcome
        if self.machine.phase in (RankPhase.RUNNING, RankPhase.LEAVING):
            return
        code = 0 if isinstance(outcome, RunCompleted) else EXIT_STOPPED if isinstance(outcome, RunStopped) else 1
        self.exit(code, str(outcome))

    def exit(self, code: int, reason: str = "") -> None:
        if self.is_up:
            self.log(f"exits {code} {reason}")
            self.kill()
            self.supervisor.child_ended(self, code, reason)


class DriverSide:
    """The interface of the process for its driver."""

    def __init__(self, process: RankProcess) -> None:
        self.now = process.clock
        self.connect = process.connect
        self.run_generation = process.run
        self.end_run = process.end
        self.interrupt = process.interrupt
        self._process = process

    def sample(self) -> ProgressSample:
        return ProgressSample(self._process.machine.step)

    def kill(self, reason: str) -> None:
        self._process.exit(SIGKILLED, reason)
