"""Program of the fork server that isolated.py starts: an interpreter that has imported torch and forks children.

Each child runs one process group. The server itself has one thread and no process group. It exits with the process that
started it, and its children exit with it.

A request to fork is one byte, with the descriptor of the child's socket. The answer is one byte, with a pidfd of the
new child. After that, the child receives requests in JSON over its own socket:

    {"connect": {GroupSpec}, "backend": "gloo", "device": null}  -> {}  or  {"error": "..."}
    {"reduce": "float32", "count": 7, "timeout_s": 60}    -> {}  or  {"error": "..."}

The tensor is in memory that both processes map. A request for a larger tensor contains the descriptor of new memory.
"""

import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import NoReturn

import torch

from agent_client.collectives.connectors import connector
from agent_client.collectives.group_spec import GroupSpec, RankGroup
from agent_client.collectives.isolated import MAX_MESSAGE_BYTES, mapped
from lighthouse_runtime.process.children import die_with_parent


def main() -> NoReturn:
    """Serve requests to fork. The arguments are the descriptor of the socket for them, and the pid of the parent."""
    orders, parent_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    # The socket may stay open after the parent has exited, because the parent's forked children have it, too.
    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if parent in ready or not _fork_child(orders):
            os._exit(0)


def _fork_child(orders: socket.socket) -> bool:
    """Receive a request and fork a child. Return False if the socket is closed."""
    order, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
    if not order:
        return False
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        orders.close()
        try:
            die_with_parent(server_pid, signal.SIGKILL)
            serve(socket.socket(fileno=descriptors[0]))
        except BaseException:  # noqa: BLE001  no error may get lost
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(descriptors[0])
    pidfd = os.pidfd_open(pid)
    socket.send_fds(orders, [b"."], [pidfd])
    os.close(pidfd)
    return True


# -- in a child


def serve(channel: socket.socket) -> None:
    """Serve requests for one rank of one process group, until the socket is closed."""
    group: RankGroup | None = None
    memory = torch.empty(0, dtype=torch.uint8)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1)
        if not message:
            return
        if descriptors:
            memory = mapped(descriptors[0])
        order, answer = json.loads(message), dict[str, str]()
        try:
            if "connect" in order:
                group = connector(order["backend"], order["device"]).connect(GroupSpec(**order["connect"]))
            else:
                assert group is not None
                dtype: torch.dtype = getattr(torch, order["reduce"])
                group.all_reduce(memory[: order["count"] * dtype.itemsize].view(dtype), order["timeout_s"])
        except Exception as e:  # noqa: BLE001  the parent reports it
            answer = {"error": str(e) or type(e).__name__}
        channel.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
