"""The daemons under measurement, ours and torchft's, each in a process of its own with its default intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.support.children import Child, Children
from examples.ports import free_port

OURS = "lighthouse-ft"
TORCHFT = "torchft"
HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Daemon:
    child: Child
    port: int
    host: str = HERE
    http_port: int = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def serve(self) -> None:
        """Of one that was prepared: listen."""
        self.child.send()
        self.child.wait_for_port(self.port, self.host)


def start_lighthouse(
    children: Children,
    product: str,
    min_replicas: int,
    *,
    heartbeat_timeout_s: float = 5.0,
    host: str = HERE,
) -> Daemon:
    if product == TORCHFT:
        timeout_ms = str(round(1000 * heartbeat_timeout_s))
        return _start_torchft(children, "lighthouse", host, str(min_replicas), timeout_ms)
    lighthouse = prepare_lighthouse(children, min_replicas, heartbeat_timeout_s=heartbeat_timeout_s, host=host)
    lighthouse.serve()
    return lighthouse


def prepare_lighthouse(
    children: Children,
    min_replicas: int,
    *,
    heartbeat_timeout_s: float = 5.0,
    host: str = HERE,
    port: int = 0,
) -> Daemon:
    """Ours, which has loaded its code and waits for serve(). It keeps a journal, by its port: on the port of one that
    has ended, it remembers."""
    port, http_port = port or free_port(), free_port()
    serve = ["--http", f"{HERE}:{http_port}", "--min-replicas", str(min_replicas)]
    serve += ["--heartbeat-timeout", f"{heartbeat_timeout_s}s", "--journal", str(children.folder / f"{port}.sqlite")]
    return _prepare_ours(children, "lighthouse", serve, host, port, http_port=http_port)


def start_manager(
    children: Children,
    product: str,
    lighthouse: Daemon,
    replica_id: str,
    *,
    host: str = HERE,
    within: Sequence[str] = (),
    store: str = "",
) -> Daemon:
    """Of a group of one rank; without `store` nobody uses its store."""
    if product == TORCHFT:
        return _start_torchft(children, "manager", host, lighthouse.address, replica_id, within=within)
    serve = ["--lighthouse", lighthouse.address, "--replica-id", replica_id]
    serve += ["--group-world-size", "1", "--store", store or f"{host}:1", "--advertise", host]
    manager = _prepare_ours(children, "manager", serve, host, free_port(), within=within)
    manager.serve()
    return manager


def _prepare_ours(
    children: Children,
    package: str,
    options: Sequence[str],
    host: str,
    port: int,
    *,
    within: Sequence[str] = (),
    http_port: int = 0,
) -> Daemon:
    program = f"import sys; from {package}.cli import main; print(flush=True); sys.stdin.readline(); main()"
    serve = ["-c", program, "serve", "--bind", f"{host}:{port}", *options]
    child = children.start(f"our {package}", *serve, within=within)
    child.read_line()
    return Daemon(child, port, host, http_port)


def _start_torchft(children: Children, kind: str, host: str, *arguments: str, within: Sequence[str] = ()) -> Daemon:
    program = ["-m", "benchmarks.support.torchft_native", kind, host, *arguments]
    child = children.start(f"torchft's {kind}", *program, within=within)
    return Daemon(child, int(child.read_line()), host)
