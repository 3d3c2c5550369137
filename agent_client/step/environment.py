"""Environment variables of a rank: ours, torchrun's and torchft's.

`Environment` contains the values that an Agent needs. `own_host` chooses the address at which peers reach this host.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_client.errors import ConfigurationError
from lighthouse_protocol.coordinator import parse_coordinator
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.net.address import advertised_host, interface_host
from lighthouse_runtime.process.kept_memory import BUFFERS

log = logging.getLogger(__name__)

_MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")
_INTERFACES = (("GLOO_SOCKET_IFNAME", False), ("NCCL_SOCKET_IFNAME", True))
"""Variables that name network interfaces, and whether the value of each is a list of name prefixes."""


@dataclass(frozen=True, slots=True)
class Variables:
    """Reads environment variables. Each method uses the first of the given names that is set and not empty."""

    variables: Mapping[str, str]

    def text(self, *names: str) -> str:
        return next((self.variables[name] for name in names if self.variables.get(name)), "")

    def read_number(self, *names: str, least: int = 0) -> int | None:
        """Return the value as an integer of at least `least`, or None if none of the variables is set.

        Raises:
            ConfigurationError: The value is not an integer, or is less than `least`.
        """
        given = [name for name in names if name in self.variables]
        if not given:
            return None
        name = next((name for name in given if self.variables[name]), given[0])
        text = self.variables[name]
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ConfigurationError(f"{name}={text!r} is not a number of at least {least}")
        return int(text)


@dataclass(frozen=True, slots=True)
class KeeperPlace:
    """Settings from the supervisor: how often, and in which buffers, a rank keeps copies of its state."""

    every: int  # interval in steps
    paths: tuple[str, ...]  # paths of the rank's buffers, or empty if it has none
    owner: str  # name of the rank


@dataclass(frozen=True, slots=True)
class Environment:
    group_rank: int
    group_world_size: int
    manager: str = field(repr=False)
    """Address of the group's manager, with the group's secret if there is one (Coordinator.join_string). If empty, rank
    0 starts a manager with `lighthouse` and `replica_id`."""
    lighthouse: str
    replica_id: str
    attempt: str
    """Number of times the group has restarted. It prevents ranks from connecting to ranks of an earlier start."""
    advertise: str | None
    """Address at which the peers can reach this host, or None to choose an address."""
    is_supervised: bool = False
    """True under `lighthouse-manager run`, also through torchrun. It drains the group before it stops a rank."""
    keeper: KeeperPlace | None = None
    """None unless the supervisor keeps copies of its ranks' states."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> "Environment":
        reader = Variables(variables)
        size = reader.read_number("LIGHTHOUSE_GROUP_WORLD_SIZE", "WORLD_SIZE", least=1) or 1
        rank = reader.read_number("LIGHTHOUSE_GROUP_RANK", "RANK") or 0
        if rank >= size:
            raise ConfigurationError(f"RANK={rank} is not below WORLD_SIZE={size}; both count in the group")
        found = cls(
            group_rank=rank,
            group_world_size=size,
            manager=_manager(reader.text("LIGHTHOUSE_MANAGER_ADDRESS"), reader.text(MANAGER_SECRET_VARIABLE)),
            lighthouse=reader.text("LIGHTHOUSE_ADDRESS", "TORCHFT_LIGHTHOUSE"),
            replica_id=reader.text("LIGHTHOUSE_MANAGER_REPLICA_ID", "REPLICA_GROUP_ID"),
            attempt=reader.text("TORCHELASTIC_RESTART_COUNT") or "0",
            advertise=reader.text("LIGHTHOUSE_MANAGER_ADVERTISE") or None,
            is_supervised=bool(reader.text("LIGHTHOUSE_INCARNATION")),
            keeper=_keeper(reader, rank, size),
        )
        if not found.manager and not found.lighthouse:
            raise ConfigurationError(
                "neither LIGHTHOUSE_MANAGER_ADDRESS (a running lighthouse-manager) nor LIGHTHOUSE_ADDRESS (rank 0 "
                "starts a manager for the group) is set"
            )
        if not found.manager and not found.replica_id:
            raise ConfigurationError("REPLICA_GROUP_ID is not set; give each replica group its own name")
        missing = [name for name in _MEETING_PLACE if not reader.text(name)]
        if size > 1 and missing:
            raise ConfigurationError(
                f"WORLD_SIZE={size}, but {' and '.join(missing)} is not set: set {' and '.join(_MEETING_PLACE)}, as "
                "torchrun does, so that the ranks of the group find each other"
            )
        return found


def own_host(peer: str, advertise: str | None, variables: Mapping[str, str] = os.environ) -> str:
    """Return the address at which the peers can reach this host, for collectives (gloo) and for copying its state.

    This is `advertise` if given, or else an address of the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME
    names, or else the address of the interface that routes to `peer` (host:port).
    """
    try:
        for variable, by_prefix in _INTERFACES:
            if not advertise and (wanted := Variables(variables).text(variable)):
                host = interface_host(wanted, variable, peer, by_prefix=by_prefix)
                log.info("gradients and heals use address %s (%s=%s)", host, variable, wanted)
                return host
        return advertised_host(peer, advertise)
    except InvalidRequest as e:
        raise ConfigurationError(str(e)) from None


def _keeper(reader: Variables, rank: int, ranks: int) -> KeeperPlace | None:
    every = reader.read_number("LIGHTHOUSE_KEEP_EVERY") or 0
    if not every:
        return None
    listed = reader.text("LIGHTHOUSE_KEEPER").split(":")
    # Under torchrun, the variable lists the buffers of all ranks on this host.
    local = (reader.read_number("LOCAL_RANK") or 0) if len(listed) > BUFFERS else 0
    paths = tuple(listed[BUFFERS * local : BUFFERS * local + BUFFERS])
    if len(paths) < BUFFERS:  # the rank still takes part when its group looks for a common state
        log.warning("LIGHTHOUSE_KEEPER names no memory for local rank %d, so this rank keeps no states", local)
        paths = ()
    incarnation = reader.text("LIGHTHOUSE_INCARNATION").partition(".")[0]
    owner = owner_name(reader.text("LIGHTHOUSE_JOB"), reader.text("REPLICA_GROUP_ID"), incarnation, rank, ranks)
    return KeeperPlace(every, paths, owner)


def owner_name(job: str, replica_id: str, incarnation: str, rank: int, ranks: int) -> str:
    """Return the name of a rank in the headers of the buffers that keep copies of its state.

    A rank ignores a buffer with another name. `ranks` is the size of the rank's group.
    """
    return json.dumps([job, replica_id, incarnation, rank, ranks])


def _manager(address: str, secret: str) -> str:
    """Return the manager's address for clients of the group, with the group's secret if there is one."""
    if not address or not secret:
        return address
    try:
        place = parse_coordinator(address, "LIGHTHOUSE_MANAGER_ADDRESS", None)
        return parse_coordinator(place.with_token(secret).join_string(), MANAGER_SECRET_VARIABLE).join_string()
    except InvalidRequest as e:
        raise ConfigurationError(str(e)) from None
