"""fork_and_monitor(): one line that puts a plain script under a supervisor.

The process becomes the supervisor (`lighthouse-manager run`, by exec: what was imported and allocated before, CUDA
included, is gone with it), and the script runs again from its beginning in a child, where the call returns at once.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from agent_client.errors import ConfigurationError
from agent_client.restart.launch import NO_NAME, Launch
from lighthouse_runtime.process.commands import START_MANAGER

_LOOPBACK = "127.0.0.1"


def fork_and_monitor(*options: str) -> None:
    """Put this script under a supervisor.

    Call it first in the script. The process becomes `lighthouse-manager run`, which starts the script again in a child
    process; there the call returns at once. Code before the call runs in both. The lighthouse and the replica group
    come from LIGHTHOUSE_ADDRESS and REPLICA_GROUP_ID. Under torchrun each rank gets its own supervisor; give torchrun
    `--max-restarts=0`.

    Args:
        *options: Options of `lighthouse-manager run`, such as "--max-restarts", "10".

    Raises:
        ConfigurationError: No lighthouse is set, or torchrun restarts ranks itself.

    Example:
        ```python
        from agent_client import fork_and_monitor

        fork_and_monitor("--max-restarts", "10")
        import torch  # from here on the code runs in the supervised child only
        ```
    """
    launch = Launch.read()
    if launch.is_supervised:
        return
    _become(
        [
            sys.executable,
            "-P",
            "-c",  # not -m: a module of the script's folder could stand in the place of ours
            START_MANAGER,
            *command(launch, os.environ, [sys.executable, *sys.orig_argv[1:]], options),
        ]
    )


def command(
    launch: Launch, variables: Mapping[str, str], invocation: Sequence[str], options: Sequence[str]
) -> list[str]:
    """The words after `lighthouse-manager`. `invocation`: how the interpreter was started."""
    if not launch.lighthouse:
        raise ConfigurationError("LIGHTHOUSE_ADDRESS is not set; fork_and_monitor() needs a running lighthouse")
    if (restarts := variables.get("TORCHELASTIC_MAX_RESTARTS", "0")) != "0":
        raise ConfigurationError(
            f"torchrun --max-restarts={restarts}: only one of the two may restart the ranks; give torchrun "
            "--max-restarts=0, and fork_and_monitor() the option --max-restarts"
        )
    words = ["run", "--nproc-per-node", "1", "--group-world-size", "1"]
    if variables.get("TORCHELASTIC_RUN_ID") == NO_NAME and not variables.get("LIGHTHOUSE_RUN_ID"):
        words += ["--run-id", launch.run]
    if launch.slots > 1:  # ranks of one run, each a replica group of its own to its supervisor
        words += ["--slot-offset", str(launch.slot), "--run-world-size", str(launch.slots)]
        words += ["--replica-id", f"{variables.get('REPLICA_GROUP_ID') or 'rank'}-{launch.slot}"]
        words += ["--bind", "[::]:0"] if "LIGHTHOUSE_MANAGER_BIND" not in variables else []
        words += ["--master-addr", variables.get("MASTER_ADDR") or _LOOPBACK]
    elif not variables.get("REPLICA_GROUP_ID"):
        words += ["--replica-id", "monitored"]
    return [*words, *options, "--", *invocation]


def _become(words: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], list(words))
