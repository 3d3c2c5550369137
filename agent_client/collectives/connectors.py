"""The kinds of process groups that can connect the same rank of the replica groups.

- `gloo`: any tensor, through the CPU. Aborted by closing its connections.
- `nccl`: through the CUDA device. Aborted by NCCL's own abort.
- `isolated`: gloo in a child process, which is killed to abort it. `isolated:nccl` does the same with NCCL.

A connector makes one group per quorum.
"""

from typing import Literal, get_args

from torch.distributed import PrefixStore

from agent_client.collectives.gloo import GlooGroup, connect_store
from agent_client.collectives.group_spec import Connector, GroupSpec, RankGroup
from agent_client.errors import ConfigurationError

ProcessGroupName = Literal["gloo", "nccl", "isolated", "isolated:nccl"]
PROCESS_GROUPS: tuple[str, ...] = get_args(ProcessGroupName)


class GlooConnector(Connector):
    def connect(self, spec: GroupSpec) -> RankGroup:
        return GlooGroup(
            PrefixStore(spec.prefix, connect_store(spec.store_address, spec.connect_timeout_s)),
            spec.rank,
            spec.size,
            spec.host,
            connect_timeout_s=spec.connect_timeout_s,
            timeout_s=spec.timeout_s,
        )


def connector(name: str, device: int | None = None) -> Connector:
    """Return the connector of a kind in PROCESS_GROUPS, for NCCL on the CUDA device `device` or the current one.

    Raises:
        ConfigurationError: The name is unknown, or the kind is not available here.
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
