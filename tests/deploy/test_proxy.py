"""The front proxy: a real HAProxy with the shipped configuration, before a lighthouse with TLS and tokens."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.refusals import NotPermitted, Unreachable
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client.clients import LighthouseClient
from tests.daemons.groups import training
from tests.daemons.secured import EVERYWHERE, Secured
from tests.processes import LOCALHOST, PATIENCE_S, ROOT, Lighthouse, eventually

from .tools import DEPLOY, run, tool

CONFIGURATION = DEPLOY / "proxy" / "haproxy.cfg"
FLOOD_S = 4.0
STEP_S = 0.05
CLIENT_TIMEOUT_S = 3.0
WAIT_S = 2 * CLIENT_TIMEOUT_S
LEASE_S = 60.0  # nothing but the end of a connection is noticed before a test is over


@dataclass(frozen=True)
class Proxy:
    secured: Secured
    port: int

    def coordinator(self, role: Role | None) -> Coordinator:
        return self.secured.coordinator(role).at(Address(LOCALHOST, self.port))

    @property
    def join_string(self) -> str:
        return self.coordinator(Role.JOIN).join_string()

    def client(self, role: Role | None = Role.JOIN, job: str = "default") -> LighthouseClient:
        return LighthouseClient(self.coordinator(role), job=job)


def variables(port: int, to: int, folder: Path) -> dict[str, str]:
    return {
        "PROXY_BIND": f"[::]:{port}",
        "PROXY_TO": f"{LOCALHOST}:{to}",
        "PROXY_FILES": str(folder),
    }


def linked(credentials: Path, folder: Path) -> Path:
    """As the README links them."""
    folder.mkdir()
    for name, target in (("server.crt", "server.pem"), ("server.key", "server.key"), ("ca.pem", "ca.pem")):
        (folder / name).symlink_to(credentials / target)
    return folder


def configuration(folder: Path, **replaced: str) -> Path:
    """The shipped file, with other numbers: `gt_256="gt 3"`."""
    text = CONFIGURATION.read_text()
    if os.geteuid() != 0:
        text = re.sub(r"^ +(user|group) haproxy\n", "", text, flags=re.MULTILINE)
    for name, new in replaced.items():
        old = name.replace("_", " ")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "haproxy.cfg"
    path.write_text(text)
    return path


@contextlib.contextmanager
def proxied(secured: Secured, folder: Path, **replaced: str) -> Generator[Proxy]:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as free:
        port = free.getsockname()[1]
    command = [tool("haproxy"), "-db", "-f", str(configuration(folder, **replaced))]
    names = variables(port, secured.lighthouse.port, linked(secured.folder, folder / "haproxy"))
    log = folder / "haproxy.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | names, stdout=output, stderr=output)
    try:

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection((LOCALHOST, port), 1.0):
                return True
            return False

        eventually(listens, "it listens")
        yield Proxy(secured, port)
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    tool("haproxy")
    folder = tmp_path_factory.mktemp("state") / "credentials"
    times = ("--heartbeat-timeout", f"{LEASE_S:g}s", "--lease", "10s")
    with Lighthouse(*EVERYWHERE, *times, "--credentials", str(folder), "--max-open-per-peer", "65536") as lighthouse:
        yield Secured(lighthouse, folder)


@pytest.fixture(scope="module")
def proxy(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    timeout = f"timeout client {CLIENT_TIMEOUT_S:g}s"
    with proxied(secured, tmp_path_factory.mktemp("proxy"), timeout_client_5m=timeout) as served:
        yield served


def flood(port: int) -> "subprocess.Popen[str]":
    """From another address than that of all others."""
    command = [sys.executable, "-m", "tests.reset_flood", str(port), f"{FLOOD_S:g}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_haproxy_finds_no_fault(secured: Secured, tmp_path: Path) -> None:
    names = variables(29510, 29510, linked(secured.folder, tmp_path / "haproxy"))
    result = run([tool("haproxy"), "-c", "-f", configuration(tmp_path)], env=os.environ | names)
    assert (result.returncode, "WARNING" in result.stderr) == (0, False), result.stderr


def test_callers_have_the_role_of_their_token_and_none_that_of_the_proxy_s_address(proxy: Proxy) -> None:
    for role in (None, Role.VIEW, Role.JOIN):
        with proxy.client(role) as client, pytest.raises(NotPermitted):
            client.kill("a", "a stranger says so", timeout_s=PATIENCE_S)
    with proxy.client(None) as client, pytest.raises(NotPermitted):
        client.status(timeout_s=PATIENCE_S)


def test_groups_train_through_it_and_the_end_of_a_process_is_noticed_at_once(proxy: Proxy) -> None:
    with training(proxy.join_string, "ends", "ab", STEP_S) as (a, b):
        quorum_id = a.commits[-1][1]
        b.manager.kill()
        began_at = time.monotonic()
        eventually(lambda: a.commits[-1][1] > quorum_id, "it goes on without the other")
        assert time.monotonic() - began_at < 0.5 * LEASE_S


def test_a_flood_of_calls_that_are_reset_harms_no_session_no_wait_and_no_new_call(proxy: Proxy) -> None:
    """All of it takes longer than the proxy's timeout for clients."""

    def wait_for_quorum(replica_id: str) -> int:
        with proxy.client(job="waits") as client:
            return client.quorum(Participant(replica_id, step=1), timeout_s=PATIENCE_S).quorum_id

    with training(proxy.join_string, "floods", "ab", STEP_S) as groups, ThreadPoolExecutor(2) as pool:
        began_at = time.monotonic()
        before = [(group.commits[-1][1], group.discards) for group in groups]
        with proxy.client(job="waits") as client:
            client.heartbeat("second", timeout_s=PATIENCE_S)
        first = pool.submit(wait_for_quorum, "first")  # the other one is alive, and has not joined
        with flood(proxy.port) as attacker:
            answered = 0
            while attacker.poll() is None or time.monotonic() - began_at < WAIT_S:
                with proxy.client(job="floods") as client:  # a connection of its own
                    answered += len(client.status(timeout_s=PATIENCE_S).jobs)
            assert attacker.stdout is not None
            assert '"calls": 0' not in attacker.stdout.read()
        assert answered > 0
        assert not first.done()
        assert wait_for_quorum("second") == first.result()
        assert [(group.commits[-1][1], group.discards) for group in groups] == before
        assert "lighthouse unreachable" not in "".join(group.manager.log() for group in groups)


def test_an_address_with_too_many_calls_is_told_so_and_one_with_too_many_connections_gets_none(
    secured: Secured, tmp_path: Path
) -> None:
    with proxied(secured, tmp_path, gt_256="gt 4", gt_2000="gt 20") as small:
        with small.client() as client, pytest.raises(Unreachable, match="more than 2000 in 10 s from this address"):
            for _ in range(30):
                client.status(timeout_s=PATIENCE_S)
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(socket.create_connection((LOCALHOST, small.port), PATIENCE_S)).sendall(b"\x16")
            with small.client() as client, pytest.raises(Unreachable):
                client.status(timeout_s=2.0)
