"""Starts a replica group: its ranks connect to each other and to their manager.

The ranks find each other through MASTER_ADDR and MASTER_PORT, as under torchrun. If no manager address is set, rank 0
starts a manager and publishes its address in the group's store. The store has no access control, so it never contains
the group's secret. Instead, each rank derives the secret from the lighthouse's join token and a nonce in the store.
"""

import contextlib
import os
import secrets
import socket
import time
from dataclasses import dataclass

from torch.distributed import PrefixStore, distributed_c10d

from agent_client.collectives.gloo import GlooGroup
from agent_client.errors import AgentError, ConfigurationError
from agent_client.manager_client.client import Presence
from agent_client.step.config import AgentConfig
from agent_client.step.environment import Environment, own_host
from lighthouse_protocol.coordinator import parse_coordinator
from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE, SECRET_BYTES
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.access import prove
from lighthouse_runtime.client.clients import ManagerClient, manager_at
from lighthouse_runtime.process.children import START_TIMEOUT_S, ServerProcess
from lighthouse_runtime.process.commands import START_MANAGER

MANAGER_KEY = "manager_address"
GROUP_WORD = "group"  # purpose of the secret; an input to its derivation, like the nonce and the replica id
STORE_RETRY_S = 0.1
_PROCESS = secrets.token_hex(8)  # identifies this process, together with its pid


@dataclass(frozen=True, slots=True)
class GroupPlace:
    group_rank: int = 0
    group_world_size: int = 1
    group: GlooGroup | None = None
    """Process group of the ranks, or None if the group has a single rank."""
    manager_process: ServerProcess | None = None
    """Process of the group's manager, or None if this rank has not started it."""
    presence: Presence | None = None
    """Keeps a watch open, so that the manager sees this rank, until the Agent has opened its own watch."""

    def __post_init__(self) -> None:
        if (self.group_world_size > 1) != (self.group is not None):
            raise ConfigurationError("group: a group of several ranks, and only such a one, needs its process group")

    def close(self) -> None:
        """Disconnect from the other ranks, and stop the manager if this rank has started it."""
        if self.group is not None:
            self.group.abort()
        if self.manager_process is not None:
            self.manager_process.stop()


ALONE = GroupPlace()


def rendezvous(env: Environment, config: AgentConfig) -> tuple[str, GroupPlace]:
    """Connect the ranks in the group. Return the address of the group's manager, and this rank's position in the group.

    Rank 0 starts the manager if no address is set.
    """
    rank, size = env.group_rank, env.group_world_size
    if size == 1:
        process, address = (None, env.manager) if env.manager else start_manager(env)
        wait_for_store(address, START_TIMEOUT_S)
        return address, GroupPlace(manager_process=process)
    os.environ["MASTER_ADDR"] = os.environ["MASTER_ADDR"].strip("[]")  # torch does not accept brackets
    presence = Presence(rank, f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}")
    try:
        return _connect_ranks(env, config, presence)
    except BaseException:
        presence.close()
        raise


def _connect_ranks(env: Environment, config: AgentConfig, presence: Presence) -> tuple[str, GroupPlace]:
    """Connect the ranks in a group. Return the manager's address, and this rank's position in the group.

    Meanwhile, `presence` shows the manager that this rank is waiting, so the manager can name the missing ranks.
    """
    rank, size = env.group_rank, env.group_world_size
    if env.manager:
        presence.show(env.manager)
    # Inside a Wrapper, this is the store of its generation.
    shared, _, _ = next(distributed_c10d.rendezvous("env://", rank, size))
    store = PrefixStore(f"lighthouse/{env.attempt}", shared)
    store = PrefixStore(str(_number_meeting(store, rank)), store)
    process = None
    if not env.manager and rank == 0:
        process, address, announced = start_announced(env)
        store.set(MANAGER_KEY, announced)
    else:
        address = env.manager or read_manager(env, store.get(MANAGER_KEY).decode())
    if not env.manager:
        presence.show(address)
    # Leave out the zone of a link-local address, because it is only valid on one host.
    rank0 = Address(os.environ["MASTER_ADDR"].partition("%")[0], 1)
    group = GlooGroup(
        PrefixStore("group", store),
        rank,
        size,
        own_host(str(rank0), config.advertise),
        connect_timeout_s=START_TIMEOUT_S,
        timeout_s=config.timeout_s,
    )
    wait_for_store(address, START_TIMEOUT_S)
    return address, GroupPlace(rank, size, group, process, presence)


def _number_meeting(store: PrefixStore, rank: int) -> int:
    """Return the number of this rendezvous, which rank 0 counts in the store.

    A script may create several Agents in turn. The number prevents a rank from reading an earlier Agent's entries.
    """
    if rank == 0:
        number = store.add("meetings", 1)
        store.set(f"meeting/{number}", "")
        return number
    own = f"met/{rank}/{os.getpid()}/{_PROCESS}"
    last = store.add(own, 0)
    store.wait([f"meeting/{last + 1}"])
    number = store.add("meetings", 0)
    store.add(own, number - last)
    return number


def _group_secret(env: Environment, nonce: str) -> str:
    """Derive the group's secret from the lighthouse's join token, which all ranks have.

    Without a token (if the lighthouse has a loopback address or runs with --insecure), the nonce is the secret.
    """
    token = _join_token(env)
    return prove(token, GROUP_WORD, nonce, env.replica_id) if token else nonce


def _join_token(env: Environment) -> str:
    return parse_coordinator(env.lighthouse).token if env.lighthouse else ""


def start_announced(env: Environment) -> tuple[ServerProcess, str, str]:
    """Start a manager for several ranks.

    Return the process, the manager's address with the group's secret, and an entry for the group's store, from which
    the other ranks derive the secret (`read_manager`).
    """
    nonce = secrets.token_hex(SECRET_BYTES)
    process, address = start_manager(env, _group_secret(env, nonce))
    return process, address, f"{manager_at(address)} {'token' if _join_token(env) else 'open'} {nonce}"


def read_manager(env: Environment, announced: str) -> str:
    """Return the manager's address with the group's secret. `announced` is the entry that rank 0 put into the store."""
    address, kind, nonce = announced.split()
    if kind == "token" and not _join_token(env):
        raise AgentError(
            "rank 0 has the lighthouse's join token and this rank has none: set LIGHTHOUSE_ADDRESS to the same join "
            "string for all ranks of the group"
        )
    secret = os.environ.get(MANAGER_SECRET_VARIABLE) or _group_secret(env, nonce)
    return manager_at(address, secret).join_string()


def start_manager(env: Environment, secret: str = "") -> tuple[ServerProcess, str]:
    """Start a manager as a child process of this rank. Return the process, and the manager's address with the secret.

    The secret comes from the environment, or else is `secret`, or else is random. The manager exits when this process
    exits.
    """
    secret = os.environ.get(MANAGER_SECRET_VARIABLE) or secret or secrets.token_hex(SECRET_BYTES)
    options = {"--replica-id": env.replica_id, "--group-world-size": str(env.group_world_size), "--bind": "[::]:0"}
    try:
        process = ServerProcess(
            START_MANAGER,
            options,
            name="the group's manager",
            variables={MANAGER_SECRET_VARIABLE: secret, "LIGHTHOUSE_MANAGER_LIGHTHOUSE": env.lighthouse},
        )
    except RuntimeError as e:
        raise AgentError(str(e)) from None
    return process, manager_at(process.announced, secret).join_string()


def wait_for_store(manager: str, timeout_s: float) -> None:
    """Wait until the group's TCPStore answers, because a supervisor starts the store in parallel with the ranks.

    Return immediately if the manager does not answer. The first quorum request will report this.
    """
    ends_at = time.monotonic() + timeout_s
    try:
        with ManagerClient(manager) as client:
            store = client.status(timeout_s=timeout_s).store_address
    except LighthouseError:
        return
    address = parse_address(store, "store") if store else None
    while address is not None:
        with contextlib.suppress(OSError), socket.create_connection((address.host, address.port or 0), timeout=1.0):
            return
        if time.monotonic() > ends_at:
            raise AgentError(f"the group's store at {store} does not answer for {timeout_s:g} s; see its manager's log")
        time.sleep(STORE_RETRY_S)
