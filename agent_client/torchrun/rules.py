"""What `--rdzv-conf` may say: names and defaults are those of torchrun's own backend where it has them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from lighthouse_protocol.identity import check_name, group_run
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.run import RunTerms

NOT_NEEDED = frozenset(
    {
        "heartbeat_timeout",  # a node is known by its stream: it fell silent that a store keeps
        "is_host",  # the store of a round is on the node of rank 0, whichever that is
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "read_timeout",
        "store_type",
        "timeout",  # torchrun adds it by itself
    }
)
"""Of torchrun's own backends: accepted, so that a command line needs no other change."""


@dataclass(frozen=True, slots=True)
class Options:
    """Lengths of time in seconds."""

    join_timeout: float = 600.0
    """How long a node waits for a round that it is in. A spare waits without limit."""
    last_call_timeout: float = 30.0
    """How long further nodes are waited for once the minimum is there. After a loss the others go on at once."""
    close_timeout: float = 30.0
    """How long the end of a run is told to a lighthouse that does not answer."""
    connect_timeout: float = 60.0
    """How long a node tries to reach the lighthouse at its start."""
    loss_timeout: float = 2.0
    """How long a node whose workers have failed waits to hear that another node was lost; then the failure is its own,
    and counts against --max-restarts."""

    @classmethod
    def read(cls, given: Mapping[str, object]) -> "Options":
        """Raises ValueError that names the option, and those that there are."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(given) - known - NOT_NEEDED):
            raise ValueError(f"--rdzv-conf has no option {unknown[0]!r}; its options are {', '.join(sorted(known))}")
        return cls(**{name: _seconds(name, value) for name, value in given.items() if name in known})


def _seconds(name: str, value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--rdzv-conf {name}={value}: it is a number of seconds above 0, for example {name}=30")
    return seconds


# -- terms --------------------------------------------------------------------
#
# What the nodes of a torchrun job agree on, as terms of a run; and what the run is called.

MAX_SPARES = 256
_SUFFIX = "nodes"


def run_of(run_id: str) -> str:
    """The run of the nodes. It is not that of their workers, which by default is called by torchrun's run id.

    Raises InvalidRequest that names the option.
    """
    return group_run(check_name(run_id, "--rdzv-id"), _SUFFIX)


def terms_of(min_nodes: int, max_nodes: int, last_call_timeout_s: float) -> RunTerms:
    """Any `min_nodes` are enough, and any `max_nodes` are all; more are spares."""
    return RunTerms(
        world_size=min(MAX_GROUP_WORLD_SIZE, max_nodes + MAX_SPARES),
        active=max_nodes,
        min_active=min_nodes,
        join_timeout_s=last_call_timeout_s,
        is_elastic=True,
    )
