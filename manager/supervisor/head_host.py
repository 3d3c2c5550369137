"""`lighthouse-manager run` on a group's first host: it serves as the manager, decides, and runs its ranks."""

import asyncio
import logging
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.messages.evidence import ProcessSnapshot
from lighthouse_protocol.messages.hosts import GroupEnded, HaltRanks, StartRanks
from lighthouse_protocol.messages.session import WatchHello
from lighthouse_protocol.messages.supervisor import SupervisorHeartbeat
from lighthouse_protocol.refusals import Unreachable
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.own_address import resolves_to_loopback
from lighthouse_runtime.process.loop import on_signals
from lighthouse_runtime.process.service_manager import ServiceManager
from manager.evidence.process_probe import look_alone
from manager.group.rules.events import GroupGivenUp, Killed, RankGivenUp
from manager.guard.client import GuardClient
from manager.server.daemon import ManagerDaemon
from manager.supervisor.driver import SupervisorDriver
from manager.supervisor.launch import Launch
from manager.supervisor.lighthouse_link import SupervisorLink
from manager.supervisor.local_host import LocalHost
from manager.supervisor.rules import events
from manager.supervisor.rules.machine import SupervisorMachine
from manager.supervisor.rules.plan import LaunchPlan
from manager.supervisor.rules.restart_policy import GROUP_SCOPE
from manager.supervisor.store import SupervisedStore
from manager.supervisor.worker_hosts import WorkerHosts

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_QUICK_LEAVE_S = 1.0


class HeadHost:
    """run() gives the status to end with."""

    def __init__(self, launch: Launch, guard: GuardClient) -> None:
        self._launch = launch
        self._guard = guard
        settings = launch.settings
        machine = SupervisorMachine(
            settings.layout,
            settings.policy,
            random.random,
            grace_s=settings.termination_grace_s,
            host_timeout_s=settings.node_timeout_s,
        )
        self._loop = asyncio.get_running_loop()
        self._driver = SupervisorDriver(machine, self._loop, self, self._finish)
        self._feed = self._driver.feed
        self._over: asyncio.Future[events.SupervisionEnded] = self._loop.create_future()
        self._workers = WorkerHosts(self._known_plan, self._feed, self._signalled)
        self._daemon: ManagerDaemon | None = None
        self._systemd = ServiceManager(self._loop, self._state)
        self._store: SupervisedStore | None = None
        self._link: SupervisorLink | None = None
        self._local: LocalHost | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._excluded: dict[int, str] = {}
        self._signals: Counter[int] = Counter()  # by host

    async def run(self) -> int:
        """Raises InvalidRequest, naming the option, if an address, a port or the store cannot be had."""
        on_signals(self._loop, lambda number: self._signalled(128 + number), self._pass_on)
        self._guard.on_failure = lambda why: self._feed(events.EndAsked(1, why))
        guarding = asyncio.create_task(self._watch_guard(), name="guard")
        try:
            await self._begin()
            self._systemd.ready()
            over = await self._over
            self._systemd.stopping()
            (log.info if over.status == 0 or self._leaving else log.error)(
                "ends with %d: %s", over.status, over.why, extra=event("supervisor_ends", status=over.status)
            )
            await self._end(over)
            return over.status
        finally:
            self._driver.close()
            guarding.cancel()
            if self._daemon is not None:
                await self._daemon.stop()
            await self._guard.stop()
            self._systemd.close()

    def _state(self) -> str:
        """What the group does, in one line."""
        group = self._daemon.state() if self._daemon is not None else "starting"
        return f"{group}; {len(self._driver.machine.running)} ranks run"

    async def _begin(self) -> None:
        config, settings = self._launch.config, self._launch.settings
        if self._launch.serves_store:
            self._store = SupervisedStore(
                self._guard,
                config.store_python,
                settings.chosen_store_port,
                # Its own ranks meet on the loopback, its peers reach it by the address that is advertised.
                LOOPBACK if resolves_to_loopback(config.advertised_host()) and settings.master_addr is None else "",
                f"{config.replica_id}/store",
                lambda why: self._feed(events.EndAsked(1, why)),
            )
            self._store.check()
        daemon = ManagerDaemon(
            self._launch.manager_config(),
            self._launch.group_secret,
            self._driver.manager_ended,
            {"Node": self._workers.entry()},
            self._look,
            self._given_up,
            self._killed,
            self._launch.run_secret,
        )
        await daemon.start()
        self._daemon = daemon
        if self._store is not None:
            self._store.start()
            if (torchrun := self._launch.torchrun) is not None and torchrun.master_port == 0:
                log.info("torchrun chooses MASTER_PORT itself (--standalone, --rdzv-backend): the store is on port %d "
                         "(LIGHTHOUSE_STORE_PORT) instead of MASTER_PORT + 2",
                         settings.chosen_store_port, extra=event("store_port"))  # fmt: skip
        plan = self._plan(daemon)
        self._link = self._launch.run_link(plan, self._driver.hear, self._heartbeat)
        self._local = self._launch.local_host(plan, self._guard, self._feed, self._link.lose)
        self._link.open()

    def _heartbeat(self, now: float) -> SupervisorHeartbeat:
        running = 0 if self._local is None else len(self._local.running)
        return replace(self._driver.machine.heartbeat(now), running=running)

    async def _look(self, request: WatchHello, is_here: bool) -> ProcessSnapshot:
        if not is_here:
            return await self._workers.look(request)
        return await self._local.look(request) if self._local is not None else await look_alone(request, is_here)

    def _known_plan(self) -> LaunchPlan:
        if self._local is None:
            raise Unreachable("host 0 is starting; ask again")
        return self._local.plan

    def _plan(self, daemon: ManagerDaemon) -> LaunchPlan:
        settings = self._launch.settings
        own = parse_address(daemon.address, "address").host if settings.nnodes > 1 else LOOPBACK
        return self._launch.plan(daemon.address, (settings.master_addr or own, settings.master_port))

    async def _end(self, over: events.SupervisionEnded) -> None:
        if self._leaving is not None:
            await asyncio.wait((self._leaving,), timeout=_QUICK_LEAVE_S)
            self._leaving.cancel()
        elif over.status == 0 and self._daemon is not None:
            await self._daemon.leave(over.why)
        if self._store is not None:
            self._store.stop()
        self._workers.end_all(GroupEnded(over.status, over.why), self._excluded)
        if self._link is not None:
            await self._link.close()

    # -- what happens

    def _given_up(self, lost: RankGivenUp | GroupGivenUp) -> None:
        """Under torchrun its own agent sees to the ranks."""
        if isinstance(lost, GroupGivenUp):
            self._feed(events.MisfitReported(lost.reason))
        elif self._local is not None and self._local.plan.torchrun is None and not lost.has_left:
            self._feed(events.RankSilent(lost.group_rank, lost.lost_at, lost.reason))

    def _killed(self, killed: Killed) -> None:
        """Ranks that are behind are lost, and count as that; what a person asks does not."""
        if not killed.behind:
            self._feed(events.KillAsked(killed.reason))
        elif self._local is not None:
            for rank in sorted(killed.behind):
                why = f"rank {rank} is behind ({killed.reason})"
                self._feed(events.RankSilent(self._local.plan.process_of(rank), self._loop.time(), why))

    def _signalled(self, status: int, host: int = 0) -> None:
        """A person's first: leave in good order; the next: without; then at once.

        One signal that reaches the supervisors of several hosts is one.
        """
        self._signals[host] += 1
        why = f"{signal.Signals(status - 128).name} to the supervisor"
        if self._leaving is None:
            self._feed(events.EndAsked(status, why, is_leaving=True))
            self._leaving = asyncio.create_task(self._leave(events.EndAsked(status, why)), name="leave")
        elif self._signals[host] > 1:
            self._leaving.cancel()
            self._feed(events.EndAsked(status, why, is_urgent=True))

    def _pass_on(self, number: int) -> None:
        if self._local is not None:
            self._local.pass_on(number)

    async def _leave(self, then: events.EndAsked) -> None:
        if self._daemon is not None and not self._driver.machine.is_over:
            await self._daemon.leave(then.why)
        self._feed(then)

    async def _watch_guard(self) -> None:
        status = await self._guard.run()
        self._driver.finish(
            events.SupervisionEnded(1, f"the guard of the ranks ended with {status}, and the ranks with it")
        )

    # -- hosts and the run, as the driver sees them

    def start(self, host: int, ranks: Sequence[int], attempt: int) -> None:
        first = 0 if self._launch.settings.policy.scope == GROUP_SCOPE else ranks[0]
        unit = f"{self._launch.incarnation}-{first}-{attempt}"
        if host == 0 and self._local is not None:
            self._local.start(ranks, attempt, unit)
        else:
            self._workers.send(host, StartRanks(tuple(ranks), attempt, unit))
        if self._daemon is not None:
            self._daemon.ranks_started(ranks if self._launch.torchrun is None else None)  # else one is all of a host

    def halt(self, host: int, ranks: Sequence[int], grace_s: float) -> None:
        if host == 0 and self._local is not None:
            self._local.halt(ranks, grace_s)
        else:
            self._workers.send(host, HaltRanks(tuple(ranks), grace_s))

    def ask_stop(self, reason: str) -> None:
        if self._link is not None:
            self._link.ask_stop(f"{self._launch.config.replica_id}: {reason}")

    def exclude(self, host: int, reason: str) -> None:
        self._excluded[host] = reason
        if host == 0 and self._link is not None:
            self._link.exclude(reason)

    def _finish(self, over: events.SupervisionEnded) -> None:
        if not self._over.done():
            self._over.set_result(over)
