"""To be imported before grpc, by a process that serves: gRPC reads its environment when it is loaded.

Without the event engine's listener a message reaches the loop over one thread less: two thirds of the CPU for each.
"""

import os
from collections.abc import Mapping

_VARIABLE = "GRPC_EXPERIMENTS"
_IS_OURS = _VARIABLE not in os.environ
os.environ.setdefault(_VARIABLE, "-event_engine_listener")


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """For a child process that is not ours."""
    return {name: value for name, value in environment.items() if not (_IS_OURS and name == _VARIABLE)}
