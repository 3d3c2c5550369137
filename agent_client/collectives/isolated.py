"""A process group in a child process. Killing the child aborts the group, even if its backend hangs.

Tensors are passed in shared memory, so each tensor is copied in and out once. The children are forked by a fork server,
an interpreter that has imported torch, so the training process itself never forks. The fork server has one thread and
no process group. It exits when the process that started it exits, and its children exit with it.

A request to fork is one byte, with the descriptor of the child's socket. The answer is one byte, with a pidfd of the
new child. The child then receives requests in JSON over its own socket:

    {"connect": {GroupSpec}, "backend": "gloo", "device": null}  -> {}  or  {"error": "..."}
    {"reduce": "float32", "count": 7, "timeout_s": 60}    -> {}  or  {"error": "..."}

If a tensor is larger than the shared memory, the request contains the descriptor of a larger shared memory.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from typing import Any, NoReturn

import torch

from agent_client.collectives.gloo import GlooConnector
from agent_client.collectives.group_spec import Connector, GroupSpec, RankGroup, register_group
from agent_client.collectives.nccl import NcclConnector
from lighthouse_runtime.process.children import die_with_parent

START_TIMEOUT_S = 120.0
"""Time limit in seconds for the start of the fork server, which imports torch."""
SLACK_S = 5.0
"""Time in seconds for a child to report that its collective has timed out. The child is then killed."""
_LEAST_BYTES = 2**20
MAX_MESSAGE_BYTES = 65536
MAX_POLL_MS = 2**31 - 1


class IsolatedConnector(Connector):
    """Creates process groups in children of a fork server. Starts the server, and restarts it if it exits."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._device = NcclConnector().device.index if backend == "nccl" else None
        self._lock = threading.Lock()
        self._is_closed = False
        self._fork_server, self._orders = _start_fork_server()

    def connect(self, spec: GroupSpec) -> "IsolatedGroup":
        order = {"backend": self._backend, "device": self._device, "connect": dataclasses.asdict(spec)}
        return IsolatedGroup(*self._fork_child(), order, spec)

    def close(self) -> None:
        self._is_closed = True
        self._fork_server.kill()
        with self._lock:
            self._end_fork_server()

    def _fork_child(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            try:
                socket.send_fds(self._orders, [b"."], [theirs.fileno()])
                _, [pidfd], _, _ = socket.recv_fds(self._orders, 1, 1)
            except (OSError, ValueError) as e:
                ours.close()
                self._end_fork_server()  # a late answer would be mistaken for the answer to the next order
                if not self._is_closed:
                    self._fork_server, self._orders = _start_fork_server()
                raise RuntimeError(f"no child for the process group: the fork server has ended ({e})") from e
        return ours, pidfd

    def _end_fork_server(self) -> None:
        self._fork_server.kill()
        self._fork_server.wait()
        self._orders.close()


def _start_fork_server() -> "tuple[subprocess.Popen[bytes], socket.socket]":
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orders.settimeout(START_TIMEOUT_S)
    # -P: the working directory may contain modules with the same names.
    program = "from agent_client.collectives.isolated import fork_server; fork_server()"
    command = [sys.executable, "-P", "-c", program, str(theirs.fileno()), str(os.getpid())]
    with theirs:
        return subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL), orders


class IsolatedGroup:
    """One rank of a process group that runs in a child process.

    abort() is thread-safe. Call all_reduce() from one thread at a time.
    """

    def __init__(self, channel: socket.socket, pidfd: int, order: dict[str, Any], spec: GroupSpec) -> None:
        self._channel = channel
        self._pidfd = pidfd
        self._timeout_s = spec.timeout_s
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._poll = select.poll()
        for descriptor in (channel.fileno(), pidfd):
            self._poll.register(descriptor, select.POLLIN)
        try:
            self._ask(order, spec.connect_timeout_s)
        except RuntimeError:
            self.abort()
            raise
        register_group(self)

    def __del__(self) -> None:
        self._channel.close()
        os.close(self._pidfd)

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        size = tensor.numel() * tensor.itemsize
        descriptors: list[int] = []
        if size > self._memory.numel():  # the child also maps the larger memory
            descriptors = [os.memfd_create("lighthouse")]
            os.ftruncate(descriptors[0], max(_LEAST_BYTES, size))
            self._memory = map_memory(os.dup(descriptors[0]))
        dtype = str(tensor.dtype).removeprefix("torch.")
        with torch.no_grad():
            shared = self._memory[:size].view(tensor.dtype).view(tensor.shape)
            shared.copy_(tensor)
            self._ask({"reduce": dtype, "count": tensor.numel(), "timeout_s": limit_s}, limit_s, descriptors)
            tensor.copy_(shared)

    def abort(self) -> None:
        """Kill the child. The kernel then closes its connections. Thread-safe and idempotent."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ask(self, order: dict[str, Any], within_s: float, descriptors: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._channel, [json.dumps(order).encode()], descriptors or [])
            answer = self._receive(within_s + SLACK_S)
        except OSError as e:
            raise RuntimeError(f"the child of the process group died ({e})") from e
        finally:
            for descriptor in descriptors or []:
                os.close(descriptor)
        if "error" in answer:
            raise RuntimeError(answer["error"])

    def _receive(self, within_s: float) -> dict[str, str]:
        ready = [descriptor for descriptor, _ in self._poll.poll(min(1000 * within_s, MAX_POLL_MS))]
        if not ready:
            self.abort()
            raise RuntimeError(f"the child of the process group did not answer within {within_s:g} s; it was killed")
        message = self._channel.recv(MAX_MESSAGE_BYTES) if self._channel.fileno() in ready else b""
        if not message:
            raise RuntimeError("the child of the process group has ended, or was killed to abort the group")
        return json.loads(message)


def map_memory(descriptor: int) -> torch.Tensor:
    """Return the memory behind the file `descriptor` as a uint8 tensor, and close the descriptor.

    The memory stays mapped until the last view of the tensor is deleted.
    """
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


# -- in the fork server


def fork_server() -> NoReturn:
    """Serve requests to fork. sys.argv contains the descriptor of the request socket, and the pid of the parent."""
    orders, parent_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    # The socket may stay open after the parent has exited, because the parent's forked children also hold it.
    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent stops this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
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
        except BaseException:  # noqa: BLE001  report every error
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
            memory = map_memory(descriptors[0])
        order, answer = json.loads(message), dict[str, str]()
        try:
            if "connect" in order:
                kind = NcclConnector(order["device"]) if order["backend"] == "nccl" else GlooConnector()
                group = kind.connect(GroupSpec(**order["connect"]))
            else:
                assert group is not None
                dtype: torch.dtype = getattr(torch, order["reduce"])
                group.all_reduce(memory[: order["count"] * dtype.itemsize].view(dtype), order["timeout_s"])
        except Exception as e:  # noqa: BLE001  the parent reports it
            answer = {"error": str(e) or type(e).__name__}
        channel.send(json.dumps(answer).encode())
