"""One start of `lighthouse-manager run`: its settings, and the parts that both kinds of supervisor make of them."""

import dataclasses
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import LIGHTHOUSE_PORT
from lighthouse_protocol.messages.supervisor import ProcessLost, SupervisorHello, ToSupervisor
from lighthouse_runtime.client.channel import target
from lighthouse_runtime.client.lighthouse import AsyncLighthouseClient
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
    """`incarnation` is this supervisor's."""

    config: ManagerConfig
    settings: SupervisorConfig
    command: tuple[str, ...]
    torchrun: Torchrun | None
    token: str | None
    incarnation: str = field(default_factory=lambda: secrets.token_hex(6))

    def manager_config(self, has_store: bool) -> ManagerConfig:
        """What the manager serves with: the size of the group, and the store that the supervisor keeps."""
        config, settings = self.config, self.settings
        store = config.store
        if has_store:
            store = str(Address(config.advertised_host(), settings.chosen_store_port))
        size = settings.layout.world_size
        if self.torchrun is not None:
            size = self.torchrun.world_size or config.group_world_size
        return dataclasses.replace(config, store=store, group_world_size=size)

    def plan(self, manager: str, master: tuple[str, int]) -> LaunchPlan:
        config, settings = self.config, self.settings
        return LaunchPlan(
            command=self.command,
            layout=settings.layout,
            host=settings.node_rank,
            replica_id=config.replica_id,
            job=config.job,
            run=settings.run_id,
            incarnation=self.incarnation,
            lighthouse=config.lighthouse,
            manager=manager,
            master=master,
            max_restarts=settings.max_restarts,
            slot_offset=settings.slot_offset,
            slots=settings.slots,
            active=settings.active_ranks,
            min_active=settings.min_active_ranks,
            stride=settings.generation_stride,
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

    def run_link(self, plan: LaunchPlan, hear: Callable[[ToSupervisor], None]) -> SupervisorLink:
        config, settings = self.config, self.settings

        def connect() -> AsyncLighthouseClient:
            return AsyncLighthouseClient(config.lighthouse, job=config.job, run=settings.run_id, token=self.token)

        address = target(config.lighthouse, "--lighthouse", LIGHTHOUSE_PORT)
        entry = SupervisorHello(plan.name, self.incarnation, socket.gethostname(), plan.own_slots)
        return SupervisorLink(connect, address, entry, hear)
