"""A real etcd of three nodes on loopback, with ports and a folder of its own; it leaves nothing behind."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed here (Debian: etcd-server); .ci/run installs it"
)
START_S = 60.0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(s.getsockname()[1]) for s in sockets]


class Node:
    """`tls`: a folder with the files of its CA and of itself; clients need a certificate of that CA then."""

    def __init__(
        self,
        name: str,
        client_port: int,
        peer_port: int,
        cluster: str,
        folder: Path,
        tls: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.name, self.port, self.folder = name, client_port, folder
        self._tls = tls
        scheme = "http" if tls is None else "https"
        client, peer = f"{scheme}://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
        secured = (
            ()
            if tls is None
            else (
                *("--cert-file", str(tls / "server.pem"), "--key-file", str(tls / "server.pem")),
                *("--client-cert-auth", "--trusted-ca-file", str(tls / "ca.pem")),
            )
        )
        self._command = [
            "etcd",
            *("--name", name, "--data-dir", str(folder / name)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--initial-cluster-token", folder.name),
            *("--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "error"),
            *secured,
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is None:
            with (self.folder / f"{self.name}.log").open("ab") as log:
                env = os.environ | {"ETCD_UNSUPPORTED_ARCH": ""}
                self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def is_healthy(self) -> bool:
        """It has a leader, and the cluster a quorum."""
        context = None
        if self._tls is not None:
            context = ssl.create_default_context(cafile=self._tls / "ca.pem")
            context.load_cert_chain(self._tls / "client.pem")
        url = f"{'http' if context is None else 'https'}://127.0.0.1:{self.port}/health"
        try:
            with urllib.request.urlopen(url, timeout=1, context=context) as answer:
                return json.load(answer)["health"] == "true"
        except (OSError, ValueError):
            return False


class EtcdCluster:
    def __init__(self, folder: Path, size: int = 3, tls: Path | None = None, options: Sequence[str] = ()) -> None:
        names = [f"n{i}" for i in range(size)]
        ports = free_ports(2 * size)
        cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, ports[size:], strict=True))
        self.nodes = [
            Node(name, ports[i], ports[size + i], cluster, folder, tls, options) for i, name in enumerate(names)
        ]

    def store(self, prefix: str = "lighthouse") -> str:
        return f"etcd://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}/{prefix}"

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        self.wait()

    def wait(self) -> None:
        until = time.monotonic() + START_S
        while not all(node.is_healthy for node in self.nodes):
            assert time.monotonic() < until, f"etcd is not healthy within {START_S:g} s"
            time.sleep(0.05)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


@contextmanager
def etcd_cluster(
    size: int = 3, tls: Path | None = None, options: Sequence[str] = ()
) -> Generator[EtcdCluster, None, None]:
    """In memory where that is possible: each write waits for the disks of two nodes."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="lighthouse-etcd-", dir=parent) as folder:
        cluster = EtcdCluster(Path(folder), size, tls, options)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.kill()
