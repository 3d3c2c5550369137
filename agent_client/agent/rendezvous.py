"""How the ranks of a replica group meet at their start: each other, and their manager."""

import contextlib
import os
import socket
import time

from torch.distributed import PrefixStore, rendezvous

from agent_client.agent.environment import Environment
from agent_client.collectives.gloo import GlooGroup
from agent_client.errors import AgentError
from agent_client.manager_client.child_manager import ManagerProcess
from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.client.manager import ManagerClient
from lighthouse_runtime.net.own_address import advertised_host
from lighthouse_runtime.process.daemon_child import START_TIMEOUT_S

MANAGER_KEY = "manager_address"
STORE_TRIED_EVERY_S = 0.1


def meet(env: Environment, timeout_s: float) -> tuple[str, ManagerProcess | None, GlooGroup | None]:
    """(the manager's address, the manager if this rank started it, the group of the ranks if there are several).

    The ranks find each other as under torchrun, by MASTER_ADDR and MASTER_PORT. Raises AgentError or RuntimeError.
    """
    if env.group_world_size == 1:
        process = None if env.manager else ManagerProcess(env.lighthouse, env.replica_id, 1)
        address = process.address if process else env.manager
        wait_for_store(address, START_TIMEOUT_S)
        return address, process, None
    shared, _, _ = next(rendezvous("env://", env.group_rank, env.group_world_size))
    store = PrefixStore(f"lighthouse/{env.attempt}", shared)
    process = None
    if not env.manager and env.group_rank == 0:
        process = ManagerProcess(env.lighthouse, env.replica_id, env.group_world_size)
        store.set(MANAGER_KEY, process.address)
    address = env.manager or store.get(MANAGER_KEY).decode()
    group = GlooGroup(
        PrefixStore("group", store),
        env.group_rank,
        env.group_world_size,
        advertised_host(f"{os.environ['MASTER_ADDR']}:1", env.advertise),
        connect_timeout_s=START_TIMEOUT_S,
        timeout_s=timeout_s,
    )
    wait_for_store(address, START_TIMEOUT_S)
    return address, process, group


def wait_for_store(manager: str, timeout_s: float) -> None:
    """Until the group's TCPStore answers: a supervisor starts it beside the ranks, and a quorum names it to the peers.

    A manager that cannot be asked is not waited for here: the request for a quorum says so. Raises AgentError.
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
        time.sleep(STORE_TRIED_EVERY_S)


def _answers(store: str) -> bool:
    address = parse_address(store, "store")
    with contextlib.suppress(OSError), socket.create_connection((address.host, address.port or 0), timeout=1.0):
        return True
    return False
