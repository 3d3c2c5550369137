"""A rank without torch: it pings until the file `end` is there, fails when it is told to, and writes down what it is.

python -m tests.chaos.worker FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from agent_client import CallWrapper, Wrapper

SLOT = int(os.environ["LIGHTHOUSE_SLOT"])
INCARNATION = os.environ["LIGHTHOUSE_INCARNATION"]


def main() -> None:
    folder = Path(sys.argv[1])
    log = os.open(folder / f"slot-{SLOT}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(what: str, **more: Any) -> None:
        """One write a line, so that a kill cuts none in two."""
        line = {"what": what, "slot": SLOT, "incarnation": INCARNATION, "pid": os.getpid(), **more}
        os.write(log, json.dumps(line).encode() + b"\n")

    @Wrapper(
        use_global_iteration=True,
        barrier_timeout=3.0,
        return_timeout=300.0,
        hard_timeout=30.0,
        max_restarts=None,
        restart_delay=None,
    )
    def train(call_wrapper: CallWrapper) -> None:
        say("runs", number=call_wrapper.iteration, rank=call_wrapper.rank, size=call_wrapper.world_size)
        while not (folder / "end").exists():
            told = folder / f"fail-{SLOT}"
            if told.exists():
                told.unlink()
                raise RuntimeError("as it was told to")
            time.sleep(0.02)
            call_wrapper.ping()

    say("starts")
    train()
    say("is done")


if __name__ == "__main__":
    main()
