"""The daemons under measurement, ours and torchft's, each in a process of its own with its default intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.support.children import Child, Children, free_port

OURS = "lighthouse-ft"
TORCHFT = "torchft"


@dataclass(frozen=True, slots=True)
class Daemon:
    child: Child
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def start_lighthouse(children: Children, product: str, min_replicas: int) -> Daemon:
    if product == TORCHFT:
        return _start_torchft(children, "lighthouse", str(min_replicas))
    serve = ["--http", "127.0.0.1:0", "--min-replicas", str(min_replicas)]
    return _start_ours(children, "lighthouse", serve)


def start_manager(children: Children, product: str, lighthouse: Daemon, replica_id: str) -> Daemon:
    """Of a group of one rank; nobody uses its store."""
    if product == TORCHFT:
        return _start_torchft(children, "manager", str(lighthouse.port), replica_id)
    serve = ["--lighthouse", lighthouse.address, "--replica-id", replica_id]
    serve += ["--group-world-size", "1", "--store", "127.0.0.1:1", "--advertise", "127.0.0.1"]
    return _start_ours(children, "manager", serve)


def _start_ours(children: Children, package: str, options: Sequence[str]) -> Daemon:
    port = free_port()
    program = f"from {package}.cli import main; main()"
    child = children.start(f"our {package}", "-c", program, "serve", "--bind", f"127.0.0.1:{port}", *options)
    child.wait_for_port(port)
    return Daemon(child, port)


def _start_torchft(children: Children, kind: str, *arguments: str) -> Daemon:
    child = children.start(f"torchft's {kind}", "-m", "benchmarks.support.torchft_native", kind, *arguments)
    return Daemon(child, int(child.read_line()))
