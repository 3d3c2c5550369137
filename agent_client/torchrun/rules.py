"""Options of `--rdzv-conf`, and the terms of the run. No I/O.

Names and defaults are the same as in torchrun's own backend, as far as it has these options.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from lighthouse_protocol.identity import check_name, group_run
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.run import RunTerms

NOT_NEEDED = frozenset(
    {
        "heartbeat_timeout",  # the lighthouse sees from its stream that a node lives
        "is_host",  # the node of rank 0 serves the store of a round
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "read_timeout",
        "store_type",
        "timeout",  # added by torchrun
    }
)
"""Options of torchrun's own backends, accepted and ignored so that a command line needs no other change."""


@dataclass(frozen=True, slots=True)
class Options:
    join_timeout: float = 600.0
    """How long a node waits for a round that includes it. A spare waits without limit."""
    last_call_timeout: float = 30.0
    """How long a round waits for more nodes once the minimum has joined. After a loss the others continue at once."""
    close_timeout: float = 30.0
    """How long a node retries to report the end of the run to a lighthouse that does not answer."""
    connect_timeout: float = 60.0
    """How long a node tries to reach the lighthouse at its start."""
    loss_timeout: float = 2.0
    """How long a node whose workers have failed waits for news that another node was lost. Without such news the
    failure counts against --max-restarts."""

    @classmethod
    def read(cls, given: Mapping[str, object]) -> "Options":
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(given) - known - NOT_NEEDED):
            raise ValueError(f"--rdzv-conf has no option {unknown[0]!r}; its options are {', '.join(sorted(known))}")
        found: dict[str, float] = {}
        for name in filter(known.__contains__, given):
            try:
                found[name] = float(str(given[name]))
            except ValueError:
                found[name] = -1.0
            if not 0 < found[name] < float("inf"):
                raise ValueError(
                    f"--rdzv-conf {name}={given[name]}: it is a number of seconds above 0, for example {name}=30"
                )
        return cls(**found)


MAX_SPARES = 256
_SUFFIX = "nodes"


def run_of(run_id: str) -> str:
    """Return the name of the nodes' run, which differs from the default name of their workers' run."""
    return group_run(check_name(run_id, "--rdzv-id"), _SUFFIX)


def terms_of(min_nodes: int, max_nodes: int, last_call_timeout_s: float) -> RunTerms:
    """Return terms that accept any `min_nodes` nodes and at most `max_nodes`; more nodes are spares."""
    return RunTerms(
        world_size=min(MAX_GROUP_WORLD_SIZE, max_nodes + MAX_SPARES),
        active=max_nodes,
        min_active=min_nodes,
        join_timeout_s=last_call_timeout_s,
        is_elastic=True,
    )
