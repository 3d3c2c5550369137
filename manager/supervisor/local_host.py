"""Runs the ranks on this host, and defines the base class of the hosts' supervisors.

`LocalHost` runs the health check, starts the ranks through the guard process, and reports their exits. `Launch`
combines the settings of one `lighthouse-manager run`. `HostSupervisor` is the base class of `HeadHost` and
`WorkerHost`.
"""

import asyncio
import dataclasses
import functools
import logging
import os
import secrets
import shlex
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, SECRET_BYTES, STORE_PORT_OFFSET
from lighthouse_protocol.messages.hosts import GroupEnded
from lighthouse_protocol.messages.incident import ProcessSnapshot
from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_protocol.messages.run import ProcessLost, RankId, SupervisorHello
from lighthouse_protocol.messages.session import WatchHello
from lighthouse_protocol.refusals import WrongState
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.address import resolves_to_loopback
from lighthouse_runtime.process.loop import ServiceManager, on_failed_callbacks, on_signals, start_part
from lighthouse_runtime.security.client_tls import variables_of
from manager.evidence import probe_with_output
from manager.guard.child import TAIL_LINES
from manager.guard.client import Command, Ended, GuardClient, format_output
from manager.preemption.sources import chosen_sources, follow, polled_sources, read_signal
from manager.server.config import ManagerConfig
from manager.supervisor.config import SupervisorConfig
from manager.supervisor.keepers import Keepers
from manager.supervisor.lighthouse_link import Supervisor, SupervisorLink
from manager.supervisor.rules.events import CheckFailed, CheckPassed, RankEnded
from manager.supervisor.rules.machine import STOPPED_STATUS
from manager.supervisor.rules.plan import LaunchPlan, Torchrun, failure_behind
from manager.supervisor.rules.restart_policy import describe_status

log = logging.getLogger(__name__)


HALTED_STATUS = -15


@dataclass(slots=True)
class _Live:
    """A rank that is starting or running."""

    attempt: int
    incarnation: str
    process: int | None = None  # the guard's number of the process, or None before the start
    is_halted: bool = False


class LocalHost:
    """Starts and stops the ranks on this host.

    Reports lost processes to the lighthouse through `link`. `report` passes events to the supervisor's state machine.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        guard: GuardClient,
        settings: SupervisorConfig,
        link: SupervisorLink,
        report: Callable[[RankEnded | CheckPassed | CheckFailed], None],
    ) -> None:
        self.plan = plan
        self._guard = guard
        self._settings = settings
        self._report = report
        self._link = link
        self.keepers = Keepers(plan, settings.keep_every)
        self._live: dict[int, _Live] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._unchecked: list[tuple[int, ...]] = []  # starts that wait for the next health check
        self._checks: dict[int, set[int]] = {}  # the health check that is running, if any, and its ranks

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(self._live)

    async def idle(self) -> None:
        """Wait until no rank is running."""
        await self._is_idle.wait()

    def start(self, ranks: Sequence[int], attempt: int, unit: str) -> None:
        """Start ranks, after the health check if there is one.

        `attempt` is the number of this start, counted from 0. `unit` identifies the start on all hosts.
        """
        self._is_idle.clear()
        for rank in ranks:
            self._live[rank] = _Live(attempt, f"{self.plan.incarnation}.{unit}")
        if self._settings.health_check is None:
            self._spawn(ranks)
        else:
            self._unchecked.append(tuple(ranks))
            asyncio.get_running_loop().call_soon(self._check_next)

    def halt(self, ranks: Sequence[int], grace_s: float) -> None:
        """Send SIGTERM to ranks, and SIGKILL after `grace_s` seconds. Repeated calls can only shorten that time."""
        for rank in ranks:
            if (live := self._live.get(rank)) is not None:
                live.is_halted = True
                if live.process is not None:
                    self._guard.halt(live.process, grace_s)
        self._end_useless_checks()

    def forward_signal(self, number: int) -> None:
        """Forward signal `number`, which the supervisor has received, to the ranks that have a handler for it."""
        for live in self._live.values():
            if live.process is not None and not live.is_halted:
                self._guard.forward_signal(live.process, number)

    def send_signal(self, rank: int | None, number: int, *, is_largest: bool = False) -> None:
        """Send signal `number` to all processes of a rank, or of all ranks on this host if `rank` is None.

        If `is_largest`, signal only the process of each rank that uses the most memory. With torchrun, all ranks on
        this host count as one rank.

        Raises:
            WrongState: The rank is not running on this host.
        """
        name = None if rank is None else self.plan.process_of(rank)
        signalled = [live.process for each, live in self._live.items() if name in (None, each) and not live.is_halted]
        if not signalled or None in signalled:
            who = self.plan.replica_id if rank is None else self.plan.label(rank)
            raise WrongState(f"{who} is restarting, or does not run on host {self.plan.host} of its group")
        for process in signalled:
            self._guard.signal_tree(process or 0, number, is_largest=is_largest)

    async def probe(self, request: WatchHello) -> ProcessSnapshot:
        """Inspect a rank's process on this host, and read the last lines of its output."""
        return await probe_with_output(request, self.last_lines(request.group_rank))

    async def last_lines(self, rank: int) -> tuple[str, ...] | None:
        """Return the last lines of a rank's output, or None if this supervisor does not run the rank.

        Under torchrun, the lines come from all ranks on this host.
        """
        live = self._live.get(self.plan.host if self.plan.torchrun is not None else rank)
        return await self._guard.tail(live.process) if live is not None and live.process is not None else None

    def _check_next(self) -> None:
        """Run one health check for all ranks that wait for it, unless one is running, because it may need all GPUs."""
        check = self._settings.health_check
        if check is not None and self._unchecked and not self._checks:
            starts, self._unchecked = self._unchecked, []
            self._run_health_check(check, self._settings.health_check_timeout_s, starts)
            self._end_useless_checks()

    def _end_useless_checks(self) -> None:
        for check, examined in self._checks.items():
            if all(self._live[rank].is_halted for rank in examined):
                self._guard.halt(check, 0.0)

    def _run_health_check(self, check: str, timeout_s: float, starts: Sequence[tuple[int, ...]]) -> None:
        """Run the command `check`, then start the ranks if it exits with 0 within `timeout_s` seconds."""
        command = Command(tuple(shlex.split(check)), {}, f"{self.plan.replica_id}/health")
        loop = asyncio.get_running_loop()
        number = self._guard.start(command, lambda ended: examined(ended))
        limit = loop.call_later(timeout_s, self._guard.halt, number, 0.0)
        ends_at = loop.time() + timeout_s
        self._checks[number] = {rank for ranks in starts for rank in ranks}

        def examined(ended: Ended) -> None:
            is_late = loop.time() >= ends_at
            limit.cancel()
            del self._checks[number]
            why = f"not done within {timeout_s:g} s" if is_late else describe_status(ended.status)
            for ranks in starts:
                self._finish_health_check(ranks, ended, why)
            self._check_next()

    def _finish_health_check(self, ranks: tuple[int, ...], ended: Ended, why: str) -> None:
        wanted = [rank for rank in ranks if not self._live[rank].is_halted]
        if wanted and ended.status != 0:
            output = format_output(ended.output)
            log.error("health check: %s%s", why, output, extra=event("health_check_failed", reason=why))
            last_line = f": {ended.output[-1]}" if ended.output else ""
            self._report(CheckFailed(self.plan.host, f"{why}{last_line}"))
        if wanted and ended.status == 0:
            self._report(CheckPassed(wanted[0], self._live[wanted[0]].attempt))
            self._spawn(wanted)
        for rank in ranks:
            if ended.status != 0 or rank not in wanted:
                attempt = self._pop(rank).attempt
                self._report(RankEnded(rank, attempt, HALTED_STATUS))

    def _spawn(self, ranks: Sequence[int]) -> None:
        folder = self._settings.log_dir
        for rank in ranks:
            live = self._live[rank]
            command = Command(
                self.plan.command,
                {**self.plan.environment(rank, live.attempt, live.incarnation), **self.keepers.environment(rank)},
                self.plan.label(rank),
                None if folder is None else str(folder / self.plan.log_name(rank, live.attempt)),
                is_shown=folder is None or self._settings.tee,
            )
            live.process = self._guard.start(command, functools.partial(self._handle_rank_end, rank))
        if ranks:
            attempt = self._live[ranks[0]].attempt
            fields = event("ranks_started", ranks=list(ranks), attempt=attempt)
            log.info("started ranks %s, attempt %d", list(ranks), attempt, extra=fields)

    def _pop(self, rank: int) -> _Live:
        live = self._live.pop(rank)
        if not self._live:
            self._is_idle.set()
        return live

    def _handle_rank_end(self, rank: int, ended: Ended) -> None:
        live = self._pop(rank)
        status, process = ended.status, RankId(self.plan.slot_of(rank), live.incarnation)
        failure = failure_behind(status, ended.output) if self.plan.torchrun is not None else None
        if failure is not None:
            status = failure.status
            process = RankId(self.plan.slot_of(failure.rank), f"{live.incarnation}.{failure.pid}")
        if status != 0 and not live.is_halted:
            reason = describe_status(status) + (f": {ended.cause}" if ended.cause else "")
            fields = event("rank_ended", rank=rank, reason=reason, attempt=live.attempt)
            level = logging.INFO if status == -signal.SIGINT else logging.ERROR  # Ctrl-C in the script
            log.log(level, "%s died: %s%s", self.plan.label(rank), reason, format_output(ended.output), extra=fields)
            self._link.report_loss(ProcessLost(process, reason, ended.output[-TAIL_LINES:]))
        self._report(RankEnded(rank, live.attempt, status, ended.cause))


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings for one `lighthouse-manager run`. Creates the components that use them."""

    config: ManagerConfig
    settings: SupervisorConfig
    command: tuple[str, ...]
    torchrun: Torchrun | None
    # Secret with which ranks and other hosts authenticate to the manager. If empty, callers on this host are trusted.
    group_secret: str = field(default="", repr=False)
    incarnation: str = field(default_factory=lambda: secrets.token_hex(6))  # identifies this supervisor
    # Secret with which the supervisor, its manager and its ranks authenticate to the lighthouse.
    run_secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_BYTES), repr=False)

    @property
    def serves_store(self) -> bool:
        """True if this supervisor runs the store. With --master-addr, only the supervisor of slot 0 does."""
        settings = self.settings
        return self.config.store == "auto" and (settings.master_addr is None or settings.slot_offset == 0)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        if self.torchrun is None:
            return self.settings.layout.world_size
        return self.torchrun.world_size or self.config.group_world_size

    def manager_config(self) -> ManagerConfig:
        """Return the manager's options, with the actual size of the group and the address of the supervised store."""
        config, settings = self.config, self.settings
        store = config.store
        if store == "auto":
            master = settings.master_addr
            host = config.advertised_host() if master is None or resolves_to_loopback(master) else master
            store = str(Address(host, settings.chosen_store_port))
        return dataclasses.replace(config, store=store, group_world_size=self.size)

    def plan(self, manager: str, master: tuple[str, int]) -> LaunchPlan:
        config, settings = self.config, self.settings
        store_port = settings.store_port or master[1] + STORE_PORT_OFFSET
        return LaunchPlan(
            command=self.command,
            layout=settings.layout,
            host=settings.node_rank,
            replica_id=config.replica_id,
            job=config.job,
            run=settings.run_id,
            incarnation=self.incarnation,
            run_secret=self.run_secret,
            manager_secret=self.group_secret,
            lighthouse=config.lighthouse,
            tls_variables=variables_of(config.tls_files),
            manager=manager,
            master=master,
            max_restarts=settings.max_restarts,
            slot_offset=settings.slot_offset,
            slots=settings.run_world_size or settings.slot_offset + self.size,
            active=settings.active_ranks,
            min_active=settings.min_active_ranks,
            stride=settings.generation_stride,
            store_port=store_port if config.store == "auto" else None,
            keeps_place=settings.master_addr is not None,
            torchrun=self.torchrun,
            trace_dir=str(settings.trace_dir) if settings.trace_dir is not None else None,
        )

    def run_link(self, plan: LaunchPlan, supervisor: Supervisor) -> SupervisorLink:
        entry = SupervisorHello(plan.name, self.incarnation, socket.gethostname(), plan.own_slots, self.run_secret)
        return SupervisorLink(self.config.coordinator, self.config.job, self.settings.run_id, entry, supervisor)


class HostSupervisor(ABC):
    """Base class for a host's supervisor. Handles signals, and runs the guard, the process that starts ranks."""

    def __init__(self, launch: Launch, guard: GuardClient) -> None:
        self._launch = launch
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self._local: LocalHost | None = None
        self._over: asyncio.Future[GroupEnded] = self._loop.create_future()
        self._signals: Counter[int] = Counter()  # number of stop signals received, by host
        self._sources = chosen_sources(launch.settings.preemption, os.environ)

    async def run(self) -> int:
        """Run the ranks until the group has ended, and return the exit status.

        Raises:
            InvalidRequest: If an address, a port or the store is not available. The error names the option.
        """
        on_signals(self._loop, self._on_stop, self._on_warning)
        on_failed_callbacks(self._loop, self.fail)
        guarding = start_part(self._watch_guard(), "the watch of the guard", self.fail)
        systemd = ServiceManager(self._loop, self._state)
        followers: list[asyncio.Task[None]] = []
        try:
            await self._begin()
            systemd.ready()
            polled = polled_sources(self._sources, self._launch.settings.metadata_endpoint)
            for source in polled:
                followers.append(start_part(follow(source, self.handle_notice), source.name, None))
            over = await self._over
            systemd.stopping()
            is_expected = over.status in (0, 128 + signal.SIGTERM) or self._signals
            why = over.why if is_expected or over.status != STOPPED_STATUS else f"{over.why}; {self._resume_hint()}"
            (log.info if is_expected else log.error)(
                "exits with %d: %s", over.status, why, extra=event("supervisor_ends", status=over.status)
            )
            await self._end(over)
            return over.status
        finally:
            for task in (guarding, *followers):
                task.cancel()
            await self._close()
            await self._guard.stop()
            systemd.close()

    def _resume_hint(self) -> str:
        """Return how to train again. A supervisor that starts while the run is stopped exits at once."""
        run, job = self._launch.settings.run_id, self._launch.config.job
        options = f"{'' if run == DEFAULT_RUN else f' --run {run}'}{'' if job == DEFAULT_JOB else f' --job {job}'}"
        return f"the run stays stopped until `lighthouse resume{options}`; then start its supervisors again"

    @abstractmethod
    def _state(self) -> str:
        """Describe the group in one line, for systemd."""

    @abstractmethod
    def handle_signal(self, status: int) -> None:
        """Handle a stop signal. `status` is 128 plus the signal's number."""

    @abstractmethod
    def handle_notice(self, source: str, notice: PreemptionNotice | None) -> None:
        """Handle the current notice from the preemption source named `source`, or None if it has no notice."""

    @abstractmethod
    async def _begin(self) -> None:
        """Start all components."""

    @abstractmethod
    async def _end(self, over: GroupEnded) -> None:
        """Report the end of the group to the other components. Call this when no rank is running any more."""

    @abstractmethod
    async def _close(self) -> None:
        """Close all components, after the group has ended or an error has occurred."""

    def _finish(self, over: GroupEnded) -> None:
        """Make `run` return the status in `over`. Only the first call has an effect."""
        if not self._over.done():
            self._over.set_result(over)

    def fail(self, status: int) -> None:
        """Exit with `status`, because a part of the supervisor has failed. The guard kills the ranks."""
        self._finish(GroupEnded(status, "a part of the supervisor has failed; see above"))

    def _on_stop(self, number: int) -> None:
        self._read_signal(number)
        self.handle_signal(128 + number)

    def _on_warning(self, number: int) -> None:
        self._read_signal(number)
        if self._local is not None:
            self._local.forward_signal(number)

    def _read_signal(self, number: int) -> None:
        grace_s = self._launch.settings.preemption_grace_s
        if (notice := read_signal(number, self._sources, os.environ, time.time(), grace_s)) is not None:
            self.handle_notice(notice.source, notice)

    async def _watch_guard(self) -> None:
        status = await self._guard.run()
        self._finish(GroupEnded(1, f"the guard process ended with status {status}, and the ranks with it"))
