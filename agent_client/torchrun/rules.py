"""Options of `--rdzv-conf`, and the settings of the run. No I/O.

Options that torchrun's own backend also has have the same names and defaults.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from lighthouse_protocol.identity import check_name, group_run
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.run import RunTerms

NOT_NEEDED = frozenset(
    {
        "heartbeat_timeout",  # the lighthouse detects a dead node by its broken stream
        "is_host",  # the node with rank 0 serves the store of a round
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "read_timeout",
        "store_type",
        "timeout",  # added by torchrun
    }
)
"""Options of torchrun's own backends. They are accepted and ignored, so that command lines need not be changed."""


@dataclass(frozen=True, slots=True)
class Options:
    join_timeout: float = 600.0
    """Time in seconds for which a node waits for a round that includes it. A spare waits indefinitely."""
    last_call_timeout: float = 30.0
    """Time in seconds for which a round waits for more nodes once the minimum has joined. After a loss, the remaining
    nodes continue immediately."""
    close_timeout: float = 30.0
    """Time in seconds for which a node tries to report the end of the run to an unreachable lighthouse."""
    connect_timeout: float = 60.0
    """Time in seconds for which a starting node tries to reach the lighthouse."""
    loss_timeout: float = 2.0
    """Time in seconds for which a node whose workers have failed waits for a report that another node was lost. If none
    arrives, the failure counts against --max-restarts."""

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
    """Return the name of the nodes' run. It differs from the default name of the workers' run.

    Raises:
        InvalidRequest: `run_id` is not a valid name.
    """
    return group_run(check_name(run_id, "--rdzv-id"), _SUFFIX)


def terms_of(min_nodes: int, max_nodes: int, last_call_timeout_s: float) -> RunTerms:
    """Return the settings of a run with `min_nodes` to `max_nodes` active nodes. Any further nodes are spares."""
    return RunTerms(
        world_size=min(MAX_GROUP_WORLD_SIZE, max_nodes + MAX_SPARES),
        active=max_nodes,
        min_active=min_nodes,
        join_timeout_s=last_call_timeout_s,
        is_elastic=True,
    )
