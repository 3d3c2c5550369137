"""The measured daemons, ours and torchft's. Each runs in a separate process with its default intervals."""

import ssl
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.support.children import Child, Children
from examples.ports import free_port
from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.process.commands import START_MANAGER
from lighthouse_runtime.security.credentials import Tokens, load_or_make

OURS = "lighthouse-ft"
TORCHFT = "torchft"
HERE = "127.0.0.1"
SCRAPE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Daemon:
    child: Child
    port: int
    http_port: int = 0
    join_string: str = field(default="", repr=False)
    """Join string for the managers of a lighthouse with TLS, in place of its address."""
    credentials: Path | None = None
    """Folder with the CA and the tokens of a lighthouse with TLS."""

    @property
    def address(self) -> str:
        return f"{HERE}:{self.port}"

    @property
    def told(self) -> str:
        """Join string or address, for the clients."""
        return self.join_string or self.address

    def serve(self) -> None:
        """Let a prepared daemon listen, and wait until it does."""
        self.child.send()
        self.child.wait_for_port(self.port)


def start_lighthouse(children: Children, product: str, min_replicas: int, heartbeat_timeout_s: float = 5.0) -> Daemon:
    if product == TORCHFT:
        timeout_ms = str(round(1000 * heartbeat_timeout_s))
        return _start_torchft(children, "lighthouse", str(min_replicas), timeout_ms)
    lighthouse = prepare_lighthouse(children, min_replicas, heartbeat_timeout_s=heartbeat_timeout_s)
    lighthouse.serve()
    return lighthouse


def prepare_lighthouse(
    children: Children,
    min_replicas: int,
    *,
    heartbeat_timeout_s: float = 5.0,
    port: int = 0,
    has_tls: bool = False,
    options: Sequence[str] = (),
) -> Daemon:
    """Start our lighthouse, which loads its code and waits for serve().

    The port names its journal, so a lighthouse on the port of an ended one continues its journal.
    """
    port, http_port = port or free_port(), free_port()
    serve = ["--http", f"{HERE}:{http_port}", "--min-replicas", str(min_replicas)]
    serve += ["--heartbeat-timeout", f"{heartbeat_timeout_s}s", "--journal", str(children.folder / f"{port}.sqlite")]
    serve += options
    join_string, credentials = "", None
    if has_tls:
        credentials = children.folder / "credentials"
        made = load_or_make(credentials, (HERE,))
        serve += ["--tls-cert", str(made.certificate), "--tls-key", str(made.key), "--credentials", str(made.folder)]
        token = Tokens.read(made.folder).newest(Role.JOIN)
        join_string = Coordinator((Address(HERE, port),), made.ca_pin, token).join_string()
    child = _prepare_ours(children, "lighthouse", serve, port)
    return Daemon(child, port, http_port, join_string, credentials)


def replace_lighthouse(old: Daemon, new: Daemon, away_s: float) -> float:
    """Kill a lighthouse, let the prepared one serve after `away_s`, and return the time of the kill."""
    killed_at = time.monotonic()
    old.child.end()
    time.sleep(away_s)
    new.serve()
    return killed_at


def start_manager(
    children: Children, product: str, lighthouse: Daemon, replica_id: str, *, store: str = f"{HERE}:1"
) -> Daemon:
    """Start the manager of a group of one rank. Without `store`, the address of its store is a dummy."""
    if product == TORCHFT:
        return _start_torchft(children, "manager", lighthouse.address, replica_id)
    serve = ["--lighthouse", lighthouse.told, "--replica-id", replica_id]
    serve += ["--group-world-size", "1", "--store", store, "--advertise", HERE]
    port = free_port()
    manager = Daemon(_prepare_ours(children, "manager", serve, port), port)
    manager.serve()
    return manager


def start_supervisor(
    children: Children, lighthouse: Daemon, replica_id: str, ranks: int, options: Sequence[str], script: Sequence[str]
) -> Child:
    """Start ranks of a group under a supervisor. `script` is a module with its arguments."""
    given = ["--lighthouse", lighthouse.told, "--replica-id", replica_id, "--bind", f"{HERE}:0", "--advertise", HERE]
    given += ["--nproc-per-node", str(ranks), "--log-level", "warning", *options]
    return children.start(f"supervisor of {replica_id}", "-c", START_MANAGER, "run", *given, "--", "-m", *script)


def scrape(daemon: Daemon) -> dict[str, float]:
    """Return the metrics by name and labels. Raises OSError if the daemon does not answer."""
    request, context = urllib.request.Request(f"http://{HERE}:{daemon.http_port}/metrics"), None
    if daemon.credentials is not None:
        request.type = "https"
        request.add_header("Authorization", f"Bearer {Tokens.read(daemon.credentials).newest(Role.VIEW)}")
        context = ssl.create_default_context(cafile=daemon.credentials / "ca.pem")
    with urllib.request.urlopen(request, timeout=SCRAPE_TIMEOUT_S, context=context) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def is_standing(lighthouse: Daemon) -> bool:
    """Check whether the default job has a standing quorum."""
    try:
        return scrape(lighthouse).get('lighthouse_quorum_phase{job="default",phase="standing"}') == 1.0
    except OSError:
        return False


def _prepare_ours(children: Children, package: str, options: Sequence[str], port: int) -> Child:
    program = f"import sys; from {package}.cli import main; print(flush=True); sys.stdin.readline(); main()"
    child = children.start(f"our {package}", "-c", program, "serve", "--bind", f"{HERE}:{port}", *options)
    child.read_line()
    return child


def _start_torchft(children: Children, kind: str, *arguments: str) -> Daemon:
    child = children.start(f"torchft's {kind}", "-m", "benchmarks.support.torchft_native", kind, HERE, *arguments)
    return Daemon(child, int(child.read_line()))
