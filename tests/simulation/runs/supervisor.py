"""A supervisor of one host: the product's SupervisorDriver and Report on a virtual clock; its ranks are a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lighthouse_protocol.messages.run import (
    HelloRejected,
    ProcessLost,
    RankId,
    RunCompleted,
    RunStopped,
    SupervisorHeartbeat,
    SupervisorHello,
    SupervisorWelcome,
)
from manager.supervisor.driver import SupervisorDriver
from manager.supervisor.rules import events
from manager.supervisor.rules.machine import Layout, SupervisorMachine
from manager.supervisor.rules.restart_policy import GROUP_SCOPE, RANK_SCOPE, Report, RestartPolicy
from tests.simulation.runs.links import Link
from tests.simulation.runs.rank import RankProcess
from tests.simulation.world import Process, Timers

if TYPE_CHECKING:
    from tests.simulation.runs.simulation import RunSimulation

NOTICES_S = 0.02
GRACE_S = 1.0
BEAT_S = 1.0
BACK_OFF_S = (0.1, 1.0)
STOP_KEPT_S = 60.0


class Host:
    """What outlives a supervisor: its place in the run, and the scheduler that starts it."""

    def __init__(self, simulation: "RunSimulation", index: int) -> None:
        self.simulation = simulation
        self.name = f"host{index}"
        per_host = simulation.plan.ranks_per_host
        self.slots = tuple(range(index * per_host, (index + 1) * per_host))
        self.supervisor: Supervisor | None = None
        self.others: list[Supervisor] = []  # of its name, beside it

    @property
    def is_up(self) -> bool:
        return self.supervisor is not None and self.supervisor.is_up

    @property
    def ranks(self) -> list[RankProcess]:
        return [rank for rank in self.supervisor.ranks.values() if rank.is_up] if self.supervisor else []

    def launch(self) -> None:
        if not self.is_up:
            self.supervisor = Supervisor(self)

    def start_twin(self) -> None:
        """Start a second supervisor with the same name.

        It is refused while the first is connected, and takes the name if the first is cut off or paused for too long.
        """
        self.others.append(Supervisor(self))

    def was_welcomed(self, supervisor: "Supervisor") -> None:
        if supervisor in self.others:
            self.others.remove(supervisor)
            self.others += [self.supervisor] if self.supervisor is not None else []
            self.supervisor = supervisor

    def kill_supervisor(self, back_after_s: float) -> None:
        """Kill the supervisor and its ranks. The scheduler starts it again."""
        assert self.supervisor is not None
        self.supervisor.kill()
        self.simulation.world.after(back_after_s, self.launch)


class Supervisor(Process):
    def __init__(self, host: Host) -> None:
        super().__init__(host.simulation.world, f"supervisor {host.name}", host.name)
        plan = host.simulation.plan
        self.site = host
        self.simulation = host.simulation
        self.incarnation = self.simulation.new_name("s")
        self.secret = f"known to {self.incarnation} and its ranks alone"
        self.ranks: dict[int, RankProcess] = {}
        self.born_at = self.world.now
        self.code: int | None = None
        self._has_heard_stop = False
        self._over: events.SupervisionEnded | None = None
        policy = RestartPolicy(
            max_restarts=plan.budget,
            delay_s=plan.restart_s,
            max_delay_s=4 * plan.restart_s,
            max_startup_failures=0,
            scope=GROUP_SCOPE if plan.is_group_scope else RANK_SCOPE,
        )
        layout = Layout(1, len(host.slots))
        self.machine = SupervisorMachine(layout, policy, self.world.random.random, grace_s=GRACE_S)
        self.driver = SupervisorDriver(self.machine, Timers(self), self)
        self.link = Link(self, self.simulation.network, self._opened, self._heard, self._closed)
        self._report = Report(self.link.send)
        self.on_death.append(self._die)
        self.log("starts")
        self._connect()
        self.after(BEAT_S, self._beat)

    # -- the stream

    def _connect(self) -> None:
        self.link.open(self.simulation.lighthouse)

    def _opened(self) -> None:
        self.link.send(SupervisorHello(self.site.name, self.incarnation, self.host, self.site.slots, self.secret))

    def _closed(self) -> None:
        self._report.end_stream(self.clock())
        self.after(self.world.random.uniform(*BACK_OFF_S), self._connect)

    def _beat(self) -> None:
        if self._report.is_open:
            self.link.send(SupervisorHeartbeat())
        self.after(BEAT_S, self._beat)

    def _heard(self, message: Any) -> None:
        match message:
            case SupervisorWelcome():
                self.site.was_welcomed(self)
                self._report.begin_stream(self.clock())
            case HelloRejected(error) if not self._report.is_final(error, self.clock()):
                return
            case RunStopped() | RunCompleted():  # after a completion there is nothing to stop
                self._has_heard_stop = True
            case _:
                pass
        self.driver.receive(message)
        if self._has_heard_stop and self._over is not None:
            self._exit(self._over.status, self._over.why)

    # -- the run, as the driver sees it

    def ask_stop(self, reason: str) -> None:
        self._report.ask_stop(reason)

    def exclude(self, host: int, reason: str) -> None:
        raise AssertionError((host, reason))

    # -- ranks

    def start(self, host: int, ranks: Sequence[int], attempt: int) -> None:
        unit = f"{self.incarnation}.{self.simulation.new_name('i')}"
        for rank in ranks:
            self._start(self.site.slots[rank], attempt, unit)

    def halt(self, host: int, ranks: Sequence[int], grace_s: float) -> None:
        for rank in ranks:
            self._halt(self.ranks[self.site.slots[rank]], grace_s)

    def _start(self, slot: int, attempt: int, unit: str) -> None:
        old = self.ranks.get(slot)
        assert old is None or not old.is_up
        self.ranks[slot] = RankProcess(self.simulation, self, RankId(slot, unit), attempt)
        self.simulation.checkers.started(self.ranks[slot])

    def _halt(self, rank: RankProcess, grace_s: float) -> None:
        """Send SIGTERM, or SIGKILL to a paused rank."""
        self.after(grace_s if rank.is_paused else NOTICES_S, rank.exit, -15, "its supervisor ends it")

    def child_ended(self, rank: RankProcess, code: int, reason: str) -> None:
        """Handle SIGCHLD."""
        if self.is_up:
            self.after(NOTICES_S, self._reap, rank, code, reason)

    def _reap(self, rank: RankProcess, code: int, reason: str) -> None:
        if code:
            self._report.add_loss(ProcessLost(rank.rank, reason or f"exit code {code}"), self.clock())
        self.driver.feed(events.RankEnded(rank.rank.slot - self.site.slots[0], rank.attempt, code, reason))

    # -- its end

    def finish(self, over: events.SupervisionEnded) -> None:
        """Exit, but wait a while if the lighthouse has not received a stop yet."""
        if self._report.stop is None or self._has_heard_stop:
            return self._exit(over.status, over.why)
        self._over = over
        return self.after(STOP_KEPT_S, self._exit, over.status, over.why)

    def _exit(self, code: int, why: str) -> None:
        self.log(f"exits {code}: {why}")
        self.code = code
        self.kill()
        self.simulation.supervisor_ended(self)

    def _die(self) -> None:
        """Kill everything that the supervisor has started."""
        self.simulation.network.end_all(self)
        for rank in self.ranks.values():
            rank.kill()
