"""The environment variables of a rank: ours, torchrun's and torchft's."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from agent_client.errors import ConfigurationError

_LIGHTHOUSE = ("LIGHTHOUSE_ADDRESS", "TORCHFT_LIGHTHOUSE")
_REPLICA_ID = ("LIGHTHOUSE_MANAGER_REPLICA_ID", "REPLICA_GROUP_ID")
_MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a rank and its manager are."""

    group_rank: int
    group_world_size: int
    manager: str
    """host:port of the group's manager. Empty: rank 0 starts one, which needs `lighthouse` and `replica_id`."""
    lighthouse: str
    replica_id: str
    attempt: str
    """The number of this start of the group, so that its ranks do not meet those of an earlier one."""
    advertise: str | None
    """Address of this host that the peers can reach."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> "Environment":
        """Raises ConfigurationError, which names the variable."""
        size = _number(variables, "WORLD_SIZE", 1, least=1)
        rank = _number(variables, "RANK", 0, least=0)
        if rank >= size:
            raise ConfigurationError(f"RANK={rank} is not below WORLD_SIZE={size}; both count in the group")
        found = cls(
            group_rank=rank,
            group_world_size=size,
            manager=variables.get("LIGHTHOUSE_MANAGER_ADDRESS", ""),
            lighthouse=_first(variables, _LIGHTHOUSE),
            replica_id=_first(variables, _REPLICA_ID),
            attempt=variables.get("TORCHELASTIC_RESTART_COUNT", "0"),
            advertise=variables.get("LIGHTHOUSE_MANAGER_ADVERTISE"),
        )
        if not found.manager and not found.lighthouse:
            raise ConfigurationError(
                "neither LIGHTHOUSE_MANAGER_ADDRESS (a running lighthouse-manager) nor LIGHTHOUSE_ADDRESS (rank 0 "
                "starts a manager for the group) is set"
            )
        if not found.manager and not found.replica_id:
            raise ConfigurationError("REPLICA_GROUP_ID is not set; give each replica group a name of its own")
        missing = [name for name in _MEETING_PLACE if not variables.get(name)]
        if size > 1 and missing:
            raise ConfigurationError(
                f"WORLD_SIZE={size} and no {' and no '.join(missing)}: the ranks of a group find each other as under "
                f"torchrun, by {' and '.join(_MEETING_PLACE)}"
            )
        return found


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((variables[name] for name in names if variables.get(name)), "")


def _number(variables: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    text = variables.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigurationError(f"{name}={text!r} is not a number of at least {least}")
    return int(text)
