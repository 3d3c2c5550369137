"""What the nodes of a torchrun job agree on, as terms of a run; and what the run is called."""

from lighthouse_protocol.identity import check_name, group_run
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.run import RunTerms

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
