"""Run a torchft script as it is, on our control plane: python -m agent_client.torchft [-m MODULE | SCRIPT] ARGUMENTS...

torchrun --nproc-per-node 8 -m agent_client.torchft train.py --steps 1000
"""

import os
import runpy
import sys

from agent_client.torchft import install

USAGE = "usage: python -m agent_client.torchft [-m MODULE | SCRIPT] ARGUMENTS..."


def main() -> None:
    match sys.argv[1:]:
        case ["-m", module, *_]:
            install()
            sys.argv = sys.argv[2:]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *_] if not script.startswith("-"):
            install()
            sys.argv = sys.argv[1:]
            sys.path[0] = os.path.dirname(os.path.abspath(script))  # as python does for a script
            runpy.run_path(script, run_name="__main__")
        case _:
            sys.exit(USAGE)


if __name__ == "__main__":
    main()
