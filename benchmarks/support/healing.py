"""One side of a heal, in a separate process: serves or receives a model of a given size, and measures the cost.

The optimizer has no state, so only the model heals. It is in CPU memory, and both sides run on one host.
"""

import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agent_client.healing.connection import StateKey
from agent_client.healing.fetch import Fetch
from agent_client.healing.server import StateServer
from agent_client.state.train_state import TrainState
from benchmarks.support.children import answer_orders
from benchmarks.support.torchft_native import native

TENSOR_BYTES = 16 * 2**20
TIMEOUT_S = 600.0
KEY = StateKey(1, 1, 0)
HERE = "127.0.0.1"


class Ours:
    """Our transport. With `copies`, the source serves a copy of its state."""

    def __init__(self, model: torch.nn.Module, host: str = HERE, *, copies: bool) -> None:
        self._state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self._copies = copies
        self._server = StateServer(host, advertise=host)

    def serve(self) -> str:
        """Offer the state, and return the address for the target."""
        self._state.begin_step()
        self._server.publish(KEY, self._state.snapshot() if self._copies else self._state.in_place())
        return self._server.address

    def release(self) -> None:
        """Withdraw the state, since the source will write to it."""
        self._server.withdraw(TIMEOUT_S)

    def fetch(self, address: str) -> Callable[[], object]:
        """Receive the state, from several addresses if separated by spaces. Return a function that installs it."""
        self._state.begin_step()
        sources = {each: lambda each=each: each for each in address.split()}
        received = Fetch(sources, KEY, TIMEOUT_S, accept=self._state.check, silence_s=30.0).run()
        return lambda: self._state.install(received)


class Torchft:
    """torchft's transport with the options of its Manager: one chunk, read in place if it is in CPU memory."""

    def __init__(self, model: torch.nn.Module, host: str = HERE) -> None:
        native()  # avoids the other imports of the package, and their dependencies
        from torchft.checkpointing.http_transport import HTTPTransport

        self._model, self._host = model, host
        self._transport: Any = HTTPTransport(timedelta(seconds=TIMEOUT_S), num_chunks=0)
        self._step = 0

    def serve(self) -> str:
        self._step += 1
        state = {"user": {"default": dict(self._model.state_dict())}, "torchft": {"step": self._step}}
        self._transport.send_checkpoint([1], self._step, state, timedelta(seconds=TIMEOUT_S))
        return f"{self._transport.metadata().replace(socket.gethostname(), self._host)} {self._step}"

    def release(self) -> None:
        self._transport.disallow_checkpoint()

    def fetch(self, address: str) -> Callable[[], object]:
        metadata, step = address.split()
        timeout = timedelta(seconds=TIMEOUT_S)
        received = self._transport.recv_checkpoint(0, metadata, int(step), timeout)["user"]["default"]
        return partial(self._model.load_state_dict, received)


TRANSPORTS: dict[str, Callable[..., Ours | Torchft]] = {
    "torchft": Torchft,
    "snapshot": partial(Ours, copies=True),
    "hold": partial(Ours, copies=False),
}


class Side:
    def __init__(self, transport: Ours | Torchft, model: torch.nn.Module) -> None:
        self._transport = transport
        self._model = model
        self._resident_bytes = self._peak_bytes = 0
        self._cpu_s = 0.0

    def handle(self, order: str, **arguments: Any) -> Any:
        return getattr(self, order)(**arguments)

    def mark(self, value: float) -> None:
        """Set every element to that value, and start to measure memory and CPU time."""
        for parameter in self._model.parameters():
            torch.nn.init.constant_(parameter, value)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._resident_bytes = _status_bytes("VmRSS")
        self._cpu_s = time.process_time()

    def serve(self) -> dict[str, Any]:
        began_at = time.perf_counter()
        address = self._transport.serve()
        return {"address": address, "serve_s": time.perf_counter() - began_at}

    def release(self) -> float:
        """Withdraw the state, and return the CPU seconds since `mark`."""
        self._transport.release()
        self._peak_bytes = _status_bytes("VmHWM")
        return time.process_time() - self._cpu_s

    def heal(self, address: str, value: float) -> dict[str, Any]:
        began_at = time.perf_counter()
        install = self._transport.fetch(address)
        fetched_at = time.perf_counter()
        install()
        installed_at = time.perf_counter()
        self._cpu_s = time.process_time() - self._cpu_s
        self._peak_bytes = _status_bytes("VmHWM")
        if not all(bool((parameter == value).all()) for parameter in self._model.parameters()):
            raise RuntimeError("the healed state differs from the served one")
        return {"fetch_s": fetched_at - began_at, "install_s": installed_at - fetched_at, "cpu_s": self._cpu_s}

    def extra_bytes(self) -> int:
        """Return the peak of additional memory between `mark` and the end of the transfer."""
        return self._peak_bytes - self._resident_bytes


def make_model(size_bytes: int) -> torch.nn.Module:
    numbers = TENSOR_BYTES // 4
    return torch.nn.ParameterList(torch.zeros(numbers) for _ in range(size_bytes // TENSOR_BYTES))


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) * 1024


def main() -> None:
    kind, size_bytes, *host = sys.argv[1:]
    torch.set_num_threads(1)
    model = make_model(int(size_bytes))
    side = Side(TRANSPORTS[kind](model, *host), model)
    print("ready", flush=True)
    answer_orders(side.handle)


if __name__ == "__main__":
    main()
