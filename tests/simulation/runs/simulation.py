"""One run from its seed: its hosts, the faults, and the checks at the end."""

from collections.abc import Callable

from tests.simulation.faults import Fault
from tests.simulation.runs.checkers import Checkers
from tests.simulation.runs.faults import KINDS, draw_faults
from tests.simulation.runs.lighthouse import Lighthouse, RunLighthouse
from tests.simulation.runs.patience import Patience
from tests.simulation.runs.plan import RunPlan
from tests.simulation.runs.rank import EXIT_STOPPED, RankProcess
from tests.simulation.runs.supervisor import Host, Supervisor
from tests.simulation.runs.work import Work
from tests.simulation.simulation import RETRY_S, Simulation
from tests.simulation.world import Process, Violation

LOOK_EVERY_S = 0.25
BOOT_S = 1.0


class RunSimulation(Simulation):
    def __init__(self, plan: RunPlan, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(plan, KINDS, trace)
        self.plan = plan
        self.checkers = Checkers(self)
        self.patience = Patience(self)
        self.work = Work(self)
        self.lighthouse = Lighthouse(self)
        self.hosts = [Host(self, index) for index in range(plan.hosts)]
        self._trouble: dict[str, float] = {}

    def new_name(self, kind: str) -> str:
        return f"{kind}{self.next_number()}"

    @property
    def ranks(self) -> list[RankProcess]:
        return [rank for host in self.hosts for rank in host.ranks]

    # -- faults

    def latest(self, fault: Fault) -> float:
        return self.plan.faults_s - RETRY_S

    def before_fault(self, fault: Fault, target: object) -> None:
        if isinstance(target, RunLighthouse):
            self.trouble(None, until=self.world.now + fault.for_s)

    # -- who is undisturbed

    def trouble(self, what: Process | str | None, *, until: float) -> None:
        """Note a disturbance of a process, of a host's network, or, for None, of the lighthouse."""
        key = what.name if isinstance(what, Process) else what or ""
        self._trouble[key] = max(self._trouble.get(key, 0.0), until)

    def is_untroubled(self, process: RankProcess | Supervisor, for_s: float) -> bool:
        """Return whether a stream has been open for that long without a disturbance."""
        since = self.world.now - for_s
        is_old = process.link.is_open and process.link.opened_at <= since and self.lighthouse.up_since <= since
        return is_old and not process.is_paused and not self.was_troubled(process, for_s)

    def was_troubled(self, process: RankProcess | Supervisor, within_s: float) -> bool:
        """Return whether a disturbance of the process, its host or the lighthouse ended less than `within_s` ago."""
        since = self.world.now - within_s
        return any(self._trouble.get(key, 0.0) > since for key in (process.name, process.host, ""))

    # -- the operator, and the scheduler of the job

    def operator(self, act: Callable[[RunLighthouse], object]) -> bool:
        process = self.lighthouse.process
        if process is None or not process.is_up or process.is_paused:
            return False
        self.world.at(self.world.now, process, act, process)
        return True

    def resume(self) -> bool:
        is_done = self.operator(lambda process: process.driver.request_resume())
        if is_done:
            self.world.after(self.plan.relaunch_s, self._launch_all)
        return is_done

    def launch_again(self) -> bool:
        """Launch the same run again if its training has ended."""
        is_over = self.checkers.ended_by == "completed" and not any(host.is_up for host in self.hosts)
        if is_over:
            self._launch_all()
        return is_over

    def _launch_all(self) -> None:
        for host in self.hosts:
            host.launch()

    def supervisor_ended(self, supervisor: Supervisor) -> None:
        """Restart a supervisor that has exited, except with 0, or with 130 while the run is stopped."""
        self.world.counts[f"supervisors that exit {supervisor.code}"] += 1
        is_left = supervisor.code == 0 or (supervisor.code == EXIT_STOPPED and self.checkers.stop is not None)
        if not is_left and supervisor is supervisor.site.supervisor:
            self.world.after(self.plan.relaunch_s, supervisor.site.launch)

    # -- the run

    def run(self) -> None:
        world, plan = self.world, self.plan
        world.after(world.random.random() * BOOT_S, self.lighthouse.start)
        for host in self.hosts:
            world.after(world.random.random() * BOOT_S, host.launch)
        for fault in draw_faults(self):
            self.schedule(fault)
        while world.now < plan.faults_s:
            self._look()
        world.is_calm = True
        world.log("", "no more faults")
        ends_at = world.now + plan.settle_s
        while not self._has_ended():
            if world.now >= ends_at:
                raise Violation(f"G4 {plan.settle_s:.0f} s after the last fault: {self.describe()}")
            self._look()

    def _look(self) -> None:
        self.world.run(self.world.now + LOOK_EVERY_S)
        self.patience.look()

    def _has_ended(self) -> bool:
        """Return whether all supervisors have ended: with 0 after a completion, with 130 after a stop."""
        twins = [other for host in self.hosts for other in host.others if other.is_up]
        if twins and not any(host.is_up for host in self.hosts) and self._are_some_missing():
            for (
                twin
            ) in twins:  # alone in a launch that nobody else has begun, it would wait for ever: its operator ends it
                twin.kill()
        if twins:
            return False
        if not self.lighthouse.is_up or any(host.is_up for host in self.hosts):
            if self.lighthouse.is_up and self._are_some_missing():
                self._launch_all()
            return False
        codes = {host.supervisor.code for host in self.hosts if host.supervisor is not None}
        return codes == {0} if self.checkers.ended_by == "completed" else codes <= {0, EXIT_STOPPED}

    def _are_some_missing(self) -> bool:
        """Return whether supervisors of the present launch have been down for a while."""
        down = [host for host in self.hosts if not host.is_up]
        return bool(down) and self.checkers.ended_at + self.plan.settle_s / 8 < self.world.now

    def describe(self) -> str:
        """Describe all processes for a failure's message."""
        process = self.lighthouse.process
        parts = [f"step {self.work.step}/{self.plan.steps}"]
        if process is not None:
            machine = process.machine
            verdict = machine.verdict(process.clock())
            current = machine.generations.current
            parts.append(f"generation {current.number} broken {current.is_broken} {verdict} {machine.stop}")
        for host in self.hosts:
            ranks = [f"{rank.rank} {rank.machine.phase} told {rank.told}" for rank in host.ranks]
            code = host.supervisor.code if host.supervisor else None
            parts.append(f"{host.name} {'up' if host.is_up else f'ended {code}'}: {'; '.join(ranks)}")
        return "\n    ".join(parts)
