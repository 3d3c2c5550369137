"""One side of a healing, in a process of its own: a model of so many bytes, served or healed, and what that took.

The optimizer keeps no state, so that the model is all there is to heal. It lies on the CPU, on one host.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from agent_client.state.train_state import TrainState
from agent_client.transfer.fetch import Fetch
from agent_client.transfer.server import StateServer
from benchmarks.support.line_protocol import answer_orders
from benchmarks.support.torchft_native import native

TENSOR_BYTES = 16 * 2**20
TIMEOUT_S = 600.0
KEY = (1, 1, 0)
HERE = "127.0.0.1"


class Transport(Protocol):
    @property
    def address(self) -> str: ...

    def serve(self) -> str:
        """What the target needs."""
        ...

    def release(self) -> None:
        """The source is about to write."""
        ...

    def fetch(self, address: str) -> Callable[[], None]:
        """What installs what was received. Several addresses, with spaces between: from all of them at once."""
        ...


class Ours:
    def __init__(self, model: torch.nn.Module, host: str = HERE, *, copies: bool) -> None:
        self._state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self._copies = copies
        self._server = StateServer(host, advertise=host)

    def serve(self) -> str:
        self._state.begin_step()
        self._server.publish(KEY, self._state.snapshot() if self._copies else self._state.in_place())
        return self._server.address

    def release(self) -> None:
        self._server.withdraw(TIMEOUT_S)

    @property
    def address(self) -> str:
        return self._server.address

    def fetch(self, address: str) -> Callable[[], None]:
        self._state.begin_step()
        fetch = Fetch(
            _finds(address.split()),
            KEY,
            TIMEOUT_S,
            accept=self._state.check,
            silence_s=30.0,
        )
        received = fetch.run()
        return lambda: self._state.install(received)


def _finds(addresses: Sequence[str]) -> dict[str, Callable[[], str]]:
    return {each: lambda each=each: each for each in addresses if each}


class Torchft:
    """As torchft's Manager uses it: in one piece, read in place where it lies on the CPU."""

    def __init__(self, model: torch.nn.Module, host: str = HERE) -> None:
        native()  # its package's other imports are not needed, nor what they need
        from torchft.checkpointing.http_transport import HTTPTransport

        self._model, self._host = model, host
        self._transport: Any = HTTPTransport(timedelta(seconds=TIMEOUT_S), num_chunks=0)
        self._step = 0
        self.address = ""

    def serve(self) -> str:
        self._step += 1
        state = {"user": {"default": dict(self._model.state_dict())}, "torchft": {"step": self._step}}
        self._transport.send_checkpoint([1], self._step, state, timedelta(seconds=TIMEOUT_S))
        return f"{self._transport.metadata().replace(socket.gethostname(), self._host)} {self._step}"

    def release(self) -> None:
        self._transport.disallow_checkpoint()

    def fetch(self, address: str) -> Callable[[], None]:
        metadata, step = address.split()
        timeout = timedelta(seconds=TIMEOUT_S)
        received = self._transport.recv_checkpoint(0, metadata, int(step), timeout)["user"]["default"]
        return lambda: self._load(received)

    def _load(self, received: dict[str, Any]) -> None:
        self._model.load_state_dict(received)


TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "torchft": Torchft,
    "snapshot": partial(Ours, copies=True),
    "hold": partial(Ours, copies=False),
}


class Steps(threading.Thread):
    """Training whose work is on an accelerator: of a step of a tenth of a second a fifth is Python's."""

    STEP_S, PYTHON_S = 0.1, 0.02

    def __init__(self) -> None:
        super().__init__(name="steps", daemon=True)
        self._times_s: list[float] = []

    def run(self) -> None:
        count = 10_000
        while (took_s := self._work(count)) < self.PYTHON_S:
            count *= 2
        count = int(count * self.PYTHON_S / took_s)
        while True:
            began_at = time.perf_counter()
            self._work(count)
            time.sleep(self.STEP_S - self.PYTHON_S)
            self._times_s.append(time.perf_counter() - began_at)

    def take(self) -> list[float]:
        """Of the steps since the last call, seconds each."""
        taken, self._times_s = self._times_s, []
        return taken

    @staticmethod
    def _work(count: int) -> float:
        began_at = time.perf_counter()
        for _ in range(count):
            pass
        return time.perf_counter() - began_at


class Side:
    def __init__(self, transport: Transport, model: torch.nn.Module) -> None:
        self._transport = transport
        self._model = model
        self._steps: Steps | None = None
        self._resident_bytes = self._peak_bytes = 0
        self._cpu_s = 0.0

    def handle(self, order: str, **arguments: Any) -> Any:
        return getattr(self, order)(**arguments)

    def mark(self, value: float) -> None:
        """Give every element that value, and measure memory from here on."""
        for parameter in self._model.parameters():
            torch.nn.init.constant_(parameter, value)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self._resident_bytes = _status_bytes("VmRSS")
        self._cpu_s = time.process_time()

    def serve(self) -> dict[str, Any]:
        began_at = time.perf_counter()
        address = self._transport.serve()
        return {"address": address, "serve_s": time.perf_counter() - began_at}

    def release(self) -> float:
        """CPU seconds since `mark`."""
        self._transport.release()
        self._peak_bytes = _status_bytes("VmHWM")
        return time.process_time() - self._cpu_s

    def steps(self) -> list[float]:
        """The seconds of each step since the last call; the first begins to train."""
        if self._steps is None:
            self._steps = Steps()
            self._steps.start()
        return self._steps.take()

    def heal(self, address: str, value: float) -> dict[str, Any]:
        began_at = time.perf_counter()
        install = self._transport.fetch(address)
        fetched_at = time.perf_counter()
        install()
        installed_at = time.perf_counter()
        self._cpu_s = time.process_time() - self._cpu_s
        self._peak_bytes = _status_bytes("VmHWM")
        if not all(bool((parameter == value).all()) for parameter in self._model.parameters()):
            raise RuntimeError("what was healed is not what was served")
        return {"fetch_s": fetched_at - began_at, "install_s": installed_at - fetched_at, "cpu_s": self._cpu_s}

    def extra_bytes(self) -> int:
        """At the highest from `mark` to the end of the transfer."""
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
