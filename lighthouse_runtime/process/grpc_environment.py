"""To be imported before grpc, by a daemon: gRPC reads its environment when it is loaded."""

import os
from collections.abc import Mapping

DEFAULTS = {
    # Without it a message reaches the loop over one thread less: two thirds of the CPU for each.
    "GRPC_EXPERIMENTS": "-event_engine_listener",
    # Else each connection that fails has a line, and any stranger can make some.
    "GRPC_VERBOSITY": "ERROR",
    # uvloop forks to start a process; gRPC would start threads of its own there, which at times abort it before it is
    # what was asked for (1 of 11 while streams open).
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
_OURS = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
os.environ.update(_OURS)


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """For a child process that is not ours."""
    return {name: value for name, value in environment.items() if _OURS.get(name) != value}
