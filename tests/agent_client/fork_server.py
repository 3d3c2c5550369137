"""Starts training processes by fork from one interpreter that has torch imported: up in 0.1 s instead of seconds.

A line of JSON on standard input starts a process; a line of JSON on standard output says its pid, and later its end:

    {"start": 1, "script": "train_ddp.py", "arguments": [...], "environment": {...}, "output": "FILE"}
    {"start": 2, "store_port": 29400, "output": "FILE"}          a TCPStore, as `--store auto` would host one
    {"started": 1, "pid": 4711}
    {"ended": 4711, "status": -9}

Everything it started ends with it.
"""

import contextlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any, NoReturn

import sklearn.datasets
import torch._dynamo  # torch's optimizers import it when first used: seconds of CPU, in every process
from torch.distributed import TCPStore

import agent_client.agent.agent
import agent_client.training.ddp
import agent_client.training.diloco
import agent_client.training.hsdp
import agent_client.training.optimizer
import agent_client.training.sampler
from manager.guard import preload

PRELOADED = (
    sklearn.datasets,
    torch._dynamo,
    agent_client.agent.agent,
    agent_client.training.ddp,
    agent_client.training.diloco,
    agent_client.training.hsdp,
    agent_client.training.optimizer,
    agent_client.training.sampler,
)


def main() -> None:
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    pending = b""
    while True:
        readable, _, _ = select.select([0, waking], [], [])
        if waking in readable:
            os.read(waking, 4096)
            _reap()
        if 0 in readable:
            received = os.read(0, 65536)
            if not received:
                return
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                _start(json.loads(line))


def _start(order: dict[str, Any]) -> None:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(order, server)
    print(json.dumps({"started": order["start"], "pid": pid}), flush=True)


def _become(order: dict[str, Any], server: int) -> NoReturn:
    """In the child: run the script, and end the process whatever it does."""
    status = 1
    try:
        preload.die_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        if "store_port" in order:
            _host_store(order["store_port"])
        os.environ.update(order["environment"])
        program = [order["script"], *order["arguments"]]
        preload.set_first_path(program)
        preload.draw_anew()
        preload.as_main(program)()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # noqa: BLE001  its last words belong into its log
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _host_store(port: int) -> NoReturn:
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    while store.port:
        signal.pause()
    raise AssertionError("a store always has a port")


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            print(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
