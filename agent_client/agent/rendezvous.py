"""How the ranks of a replica group find each other and their manager when they start."""

import contextlib
import os
import secrets
import socket
import time

from torch.distributed import PrefixStore, distributed_c10d

from agent_client.agent.config import AgentConfig
from agent_client.agent.environment import Environment
from agent_client.agent.parts import GroupPlace
from agent_client.collectives.gloo import GlooGroup
from agent_client.errors import AgentError
from agent_client.manager_client.presence import Presence
from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE, SECRET_BYTES
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.client.manager import ManagerClient, manager_at
from lighthouse_runtime.net.own_address import advertised_host
from lighthouse_runtime.process.commands import START_MANAGER
from lighthouse_runtime.process.daemon_child import START_TIMEOUT_S, ServerProcess

MANAGER_KEY = "manager_address"
STORE_RETRY_S = 0.1


def rendezvous(env: Environment, config: AgentConfig) -> tuple[str, GroupPlace]:
    """(the address of the group's manager, this rank's place in its group). Rank 0 starts the manager if none is named.

    The ranks find each other as under torchrun, by MASTER_ADDR and MASTER_PORT. Raises AgentError or RuntimeError.
    """
    rank, size = env.group_rank, env.group_world_size
    if size == 1:
        process, address = (None, env.manager) if env.manager else start_manager(env)
        wait_for_store(address, START_TIMEOUT_S)
        return address, GroupPlace(manager_process=process)
    presence = Presence(rank, f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}")
    with contextlib.ExitStack() as until_met:
        until_met.enter_context(presence)
        met = _meet(env, config, presence)
        until_met.pop_all()  # the Agent's own watch takes its place
        return met


def _meet(env: Environment, config: AgentConfig, presence: Presence) -> tuple[str, GroupPlace]:
    """Of several ranks. The manager sees those that are there before they have met, and names the missing ones."""
    rank, size = env.group_rank, env.group_world_size
    if env.manager:
        presence.show(env.manager)
    shared, _, _ = next(distributed_c10d.rendezvous("env://", rank, size))  # a wrapped function's own, in one
    store = PrefixStore(f"lighthouse/{env.attempt}", shared)
    process = None
    if not env.manager and rank == 0:
        process, address = start_manager(env)
        store.set(MANAGER_KEY, address)
    address = env.manager or store.get(MANAGER_KEY).decode()
    if not env.manager:
        presence.show(address)
    group = GlooGroup(
        PrefixStore("group", store),
        rank,
        size,
        advertised_host(f"{os.environ['MASTER_ADDR']}:1", config.advertise),
        connect_timeout_s=START_TIMEOUT_S,
        timeout_s=config.timeout_s,
    )
    wait_for_store(address, START_TIMEOUT_S)
    return address, GroupPlace(rank, size, group, process, presence)


def start_manager(env: Environment) -> tuple[ServerProcess, str]:
    """For a group that was given only a lighthouse: a child process of rank 0, which ends with it. And its address,
    with a secret that rank 0 makes and tells its mates."""
    secret = os.environ.get(MANAGER_SECRET_VARIABLE) or secrets.token_hex(SECRET_BYTES)
    options = {
        "--replica-id": env.replica_id,
        "--group-world-size": str(env.group_world_size),
        "--bind": "[::]:0",
    }
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
    """Wait until the group's TCPStore answers: a supervisor starts it beside the ranks, and a quorum names it to the
    peers.

    A manager that does not answer is not waited for here: the request for a quorum reports it. Raises AgentError.
    """
    ends_at = time.monotonic() + timeout_s
    try:
        with ManagerClient(manager) as client:
            store = client.status(timeout_s=timeout_s).store_address
    except LighthouseError:
        return
    while store and not _answers(store):
        if time.monotonic() > ends_at:
            raise AgentError(f"the group's store at {store} does not answer for {timeout_s:g} s; see its manager's log")
        time.sleep(STORE_RETRY_S)


def _answers(store: str) -> bool:
    address = parse_address(store, "store")
    with contextlib.suppress(OSError), socket.create_connection((address.host, address.port or 0), timeout=1.0):
        return True
    return False
