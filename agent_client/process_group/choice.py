"""Which process group connects the same rank of the replica groups. It is made anew for every quorum.

gloo      any tensor, through the CPU; ended by closing its connections
nccl      through the CUDA device; ended by NCCL's own abort
isolated  gloo in a child process, which is killed to end it, whatever it waits for; isolated:nccl the same of nccl
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import PrefixStore

from agent_client.errors import ConfigurationError
from agent_client.process_group.gloo import GlooGroup, connect_store


@dataclass(frozen=True, slots=True)
class Place:
    """`rank` of `size` in the group that meets in the store at `store_address` under `prefix`; `host` is the address of
    this host that peers can reach, `timeout_s` bounds a collective."""

    store_address: str
    prefix: str
    rank: int
    size: int
    host: str
    connect_timeout_s: float
    timeout_s: float


class RankGroup(Protocol):
    def all_reduce(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        """The sum over all ranks, in place. Raises RuntimeError when a peer is lost; the group is of no use then."""
        ...

    def abort(self) -> None:
        """End every collective under way, here and at the peers. From any thread; more than once does no harm."""
        ...


class Connector(Protocol):
    def connect(self, place: Place) -> RankGroup:
        """Meet all peers. Raises RuntimeError if one does not come in time."""
        ...

    def close(self) -> None: ...


class GlooConnector:
    def connect(self, place: Place) -> RankGroup:
        return GlooGroup(
            PrefixStore(place.prefix, connect_store(place.store_address, place.connect_timeout_s)),
            place.rank,
            place.size,
            place.host,
            connect_timeout_s=place.connect_timeout_s,
            timeout_s=place.timeout_s,
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
            from agent_client.process_group.nccl import NcclConnector

            return NcclConnector(device)
        case "isolated" | "isolated:nccl":
            from agent_client.process_group.isolated import IsolatedConnector

            return IsolatedConnector(name.partition(":")[2] or "gloo")
        case _:
            raise ConfigurationError(f"process_group: {name!r} is none of gloo, nccl, isolated and isolated:nccl")
