"""Run a torchft script unchanged with our lighthouse and managers.

    torchrun --nproc-per-node 8 -m agent_client.torchft train.py --steps 1000

The arguments are `-m MODULE` or `SCRIPT`, followed by the script's own arguments. A script that does not use torchft,
and so would train without the other groups, exits before its first optimizer step.
"""

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from agent_client.torchft import clients, install

USAGE = "usage: python -m agent_client.torchft [-m MODULE | SCRIPT] ARGUMENTS..."
ALONE = (
    "this script steps an optimizer and has made no torchft Manager: it would train alone, without the other replica "
    "groups. torchtitan: run `-m agent_client.integrations.torchtitan` in place of torchtitan.train, with "
    "--fault_tolerance.enable (docs/how-to/torchft.md)"
)


def run_module(module: str, before: Callable[[], None] = lambda: None) -> None:
    """Call install() and `before`, then run a module as `__main__`. It sees this process's command-line arguments."""
    install()
    before()
    refuse_to_train_alone()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def refuse_to_train_alone() -> None:
    """Make this process's first optimizer step raise SystemExit if torchft has not connected to a manager by then."""
    optimizers = importlib.import_module("torch.optim.optimizer")

    def first_step(*_: Any) -> None:
        hook.remove()
        if not clients.has_connected():
            raise SystemExit(ALONE)

    hook = optimizers.register_optimizer_step_pre_hook(first_step)


def main() -> None:
    match sys.argv[1:]:
        case ["-m", module, *_]:
            sys.argv = sys.argv[2:]
            run_module(module)
        case [script, *_] if not script.startswith("-"):
            install()
            refuse_to_train_alone()
            sys.argv = sys.argv[1:]
            sys.path[0] = os.path.dirname(os.path.abspath(script))  # as python sets it for a script
            runpy.run_path(script, run_name="__main__")
        case _:
            sys.exit(USAGE)


if __name__ == "__main__":
    main()
