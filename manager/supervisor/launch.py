"""One start of `lighthouse-manager run`: its settings, and the parts that both kinds of supervisor make of them."""

import dataclasses
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import SECRET_BYTES, STORE_PORT_OFFSET
from lighthouse_protocol.messages.supervisor import ProcessLost, SupervisorHeartbeat, SupervisorHello, ToSupervisor
from lighthouse_protocol.rules.leader_search import LeaderSearch
from lighthouse_runtime.client.lighthouse import AsyncLighthouseClient
from lighthouse_runtime.net.own_address import resolves_to_loopback
from lighthouse_runtime.security.client_tls import variables_of
from manager.guard.client import GuardClient
from manager.server.config import ManagerConfig
from manager.supervisor.config import SupervisorConfig
from manager.supervisor.lighthouse_link import SupervisorLink
from manager.supervisor.local_host import HealthCheck, LocalHost, Output
from manager.supervisor.rules.events import CheckFailed, RankEnded
from manager.supervisor.rules.plan import LaunchPlan
from manager.supervisor.rules.torchrun import Torchrun


@dataclass(frozen=True, slots=True)
class Launch:
    """`incarnation` is this supervisor's, and so is `run_secret`, by which the lighthouse knows it, its manager and its
    ranks. By `group_secret` the manager knows its ranks and the supervisors of its other hosts; empty: callers of its
    host are taken for these."""

    config: ManagerConfig
    settings: SupervisorConfig
    command: tuple[str, ...]
    torchrun: Torchrun | None
    group_secret: str = field(default="", repr=False)
    incarnation: str = field(default_factory=lambda: secrets.token_hex(6))
    run_secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_BYTES), repr=False)

    @property
    def serves_store(self) -> bool:
        """Where ranks of several supervisors meet, that of slot 0 does."""
        settings = self.settings
        return self.config.store == "auto" and (settings.master_addr is None or settings.slot_offset == 0)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        if self.torchrun is None:
            return self.settings.layout.world_size
        return self.torchrun.world_size or self.config.group_world_size

    def manager_config(self) -> ManagerConfig:
        """What the manager serves with: the size of the group, and the store that a supervisor keeps."""
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

    def local_host(
        self,
        plan: LaunchPlan,
        guard: GuardClient,
        tell: Callable[[RankEnded | CheckFailed], None],
        lose: Callable[[ProcessLost], None],
    ) -> LocalHost:
        settings = self.settings
        output = Output(settings.log_dir, settings.log_dir is None or settings.tee)
        command = settings.health_check
        check = None if command is None else HealthCheck(command, settings.health_check_timeout_s)
        return LocalHost(plan, guard, output, check, tell, lose)

    def run_link(
        self,
        plan: LaunchPlan,
        hear: Callable[[ToSupervisor], None],
        heartbeat: Callable[[float], SupervisorHeartbeat],
    ) -> SupervisorLink:
        config, settings = self.config, self.settings

        search = LeaderSearch(config.coordinator.addresses)

        def connect() -> AsyncLighthouseClient:
            coordinator = config.coordinator.at(search.address)
            return AsyncLighthouseClient(coordinator, job=config.job, run=settings.run_id)

        entry = SupervisorHello(plan.name, self.incarnation, socket.gethostname(), plan.own_slots, self.run_secret)
        return SupervisorLink(connect, str(config.coordinator), entry, hear, heartbeat, search)
