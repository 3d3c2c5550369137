"""How this process was started: its place in the run, from a supervisor's variables, or torchrun's."""

import dataclasses
import os
import secrets
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from agent_client.agent.environment import Variables
from agent_client.errors import ConfigurationError
from lighthouse_protocol.coordinator import parse_coordinator
from lighthouse_protocol.identity import group_run
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, DEFAULT_STRIDE, SECRET_BYTES
from lighthouse_protocol.messages.run import RankHello, RankId, RunTerms

NO_NAME = "none"
"""torchrun's run id where it was given none, and so that of all such jobs."""


@dataclass(frozen=True, slots=True)
class Launch:
    """`lighthouse`: an address, several, or a join string. `slot` of `slots`, which is RANK of WORLD_SIZE without a
    supervisor. `attempt` counts this slot's starts from 0. `active` and `min_active` are None unless the supervisor was
    given them. `store_port`: of the TCPStore that a supervisor serves. `secret`: its supervisor's, else
    its own."""

    lighthouse: str
    job: str
    run: str
    slot: int
    slots: int
    incarnation: str
    attempt: int
    stride: int
    active: int | None
    min_active: int | None
    is_supervised: bool
    store_port: int | None
    secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_BYTES), repr=False)

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> "Launch":
        """Raises ConfigurationError naming the variable."""
        reader = Variables(variables)
        supervised, slot = reader.text("LIGHTHOUSE_INCARNATION"), reader.number("LIGHTHOUSE_SLOT", "RANK") or 0
        offset, restarts = reader.number("LIGHTHOUSE_SLOT_OFFSET"), reader.number("TORCHELASTIC_RESTART_COUNT")
        incarnation, stride = supervised or uuid.uuid4().hex, 1
        if offset is not None:  # below torchrun, which is below a supervisor
            incarnation, slot = f"{supervised}.{os.getpid()}", offset + (reader.number("RANK") or 0)
        elif not supervised and restarts is not None:  # torchrun restarts its ranks together
            incarnation, stride = f"{incarnation}.torchrun-{restarts}", DEFAULT_STRIDE
        return cls(
            lighthouse=reader.text("LIGHTHOUSE_ADDRESS", "TORCHFT_LIGHTHOUSE"),
            job=reader.text("LIGHTHOUSE_JOB") or DEFAULT_JOB,
            run=run_of(variables),
            slot=slot,
            slots=reader.number("LIGHTHOUSE_WORLD_SIZE", "WORLD_SIZE", least=1) or 1,
            incarnation=incarnation,
            attempt=reader.number("LIGHTHOUSE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT") or 0,
            stride=reader.number("LIGHTHOUSE_STRIDE", least=1) or stride,
            active=reader.number("LIGHTHOUSE_ACTIVE_RANKS", least=1),
            min_active=reader.number("LIGHTHOUSE_MIN_ACTIVE_RANKS", least=1),
            is_supervised=bool(supervised),
            store_port=reader.number("LIGHTHOUSE_STORE_PORT"),
            secret=reader.text("LIGHTHOUSE_RUN_SECRET") or secrets.token_hex(SECRET_BYTES),
        )

    @property
    def lighthouse_address(self) -> str:
        """The first address in `lighthouse`, without a token; empty if there is none. Raises InvalidRequest."""
        if not self.lighthouse:
            return ""
        return str(parse_coordinator(self.lighthouse, "LIGHTHOUSE_ADDRESS").addresses[0])

    def of_group(self, variables: Mapping[str, str] = os.environ) -> "Launch":
        """Its place where each replica group restarts by itself. Raises ConfigurationError if it is in none."""
        reader = Variables(variables)
        replica_id = reader.text("LIGHTHOUSE_MANAGER_REPLICA_ID", "REPLICA_GROUP_ID")
        if not replica_id:
            raise ConfigurationError('REPLICA_GROUP_ID is not set; restart_scope="group" needs a replica group')
        slot = reader.number("LIGHTHOUSE_GROUP_RANK", "RANK") or 0
        slots = reader.number("LIGHTHOUSE_GROUP_WORLD_SIZE", "WORLD_SIZE", least=1) or 1
        return dataclasses.replace(self, run=group_run(self.run, replica_id), slot=slot, slots=slots)

    def entry(self, terms: RunTerms) -> RankHello:
        rank = RankId(self.slot, self.incarnation)
        return RankHello(rank, terms, self.attempt, host=socket.gethostname(), pid=os.getpid(), secret=self.secret)


def run_of(variables: Mapping[str, str]) -> str:
    """The run's id. For a torchrun job without a name, one that its ranks have in common, and no other job has."""
    reader = Variables(variables)
    run = reader.text("LIGHTHOUSE_RUN_ID", "TORCHELASTIC_RUN_ID") or DEFAULT_RUN
    if run != NO_NAME or reader.text("LIGHTHOUSE_RUN_ID"):
        return run
    error_file = PurePath(reader.text("TORCHELASTIC_ERROR_FILE"))
    if (
        reader.number("GROUP_WORLD_SIZE") == 1 and len(error_file.parents) > 3
    ):  # FOLDER/none_UNIQUE/attempt_0/0/error.json
        return f"torchrun-{socket.gethostname()}-{error_file.parents[2].name.removeprefix('none_')}"
    return f"torchrun-{reader.text('MASTER_ADDR')}-{reader.text('MASTER_PORT')}"
