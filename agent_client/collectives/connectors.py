"""Which process group connects the same rank of the replica groups. It is made anew for every quorum.

gloo      any tensor, through the CPU; ended by closing its connections
nccl      through the CUDA device; ended by NCCL's own abort
isolated  gloo in a child process, which is killed to end it, whatever it waits for; isolated:nccl the same of nccl
"""

from typing import Literal, get_args

from torch.distributed import PrefixStore

from agent_client.collectives.gloo import GlooGroup, connect_store
from agent_client.collectives.group_spec import Connector, GroupSpec, RankGroup
from agent_client.errors import ConfigurationError

ProcessGroupName = Literal["gloo", "nccl", "isolated", "isolated:nccl"]
PROCESS_GROUPS: tuple[str, ...] = get_args(ProcessGroupName)


class GlooConnector:
    def connect(self, spec: GroupSpec) -> RankGroup:
        return GlooGroup(
            PrefixStore(spec.prefix, connect_store(spec.store_address, spec.connect_timeout_s)),
            spec.rank,
            spec.size,
            spec.host,
            connect_timeout_s=spec.connect_timeout_s,
            timeout_s=spec.timeout_s,
        )

    def close(self) -> None:
        """Nothing is kept between groups."""


def connector(name: str, device: int | None = None) -> Connector:
    """`device`: the CUDA device's number, for nccl; the current one by default.

    Raises ConfigurationError for a name that is none of the above, or that cannot be had here.
    """
    match name:
        case "gloo":
            return GlooConnector()
        case "nccl":
            from agent_client.collectives.nccl import NcclConnector

            return NcclConnector(device)
        case "isolated" | "isolated:nccl":
            from agent_client.collectives.isolated import IsolatedConnector

            return IsolatedConnector(name.partition(":")[2] or "gloo")
        case _:
            raise ConfigurationError(f"process_group: {name!r} is not one of {', '.join(PROCESS_GROUPS)}")
