"""How the ranks of a replica group meet at their start: each other, and their manager."""

import os

from torch.distributed import PrefixStore, rendezvous

from agent_client.environment import Environment
from agent_client.manager_process import ManagerProcess
from agent_client.process_group.gloo import GlooGroup
from agent_client.server_process import START_TIMEOUT_S
from lighthouse_runtime.address import advertised_host

MANAGER_KEY = "manager_address"


def meet(env: Environment, timeout_s: float) -> tuple[str, ManagerProcess | None, GlooGroup | None]:
    """(the manager's address, the manager if this rank started it, the group of the ranks if there are several).

    The ranks find each other as under torchrun, by MASTER_ADDR and MASTER_PORT. Raises AgentError or RuntimeError.
    """
    if env.group_world_size == 1:
        process = None if env.manager else ManagerProcess(env.lighthouse, env.replica_id, 1)
        return process.address if process else env.manager, process, None
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
    return address, process, group
