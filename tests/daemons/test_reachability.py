"""A manager whose host's name is a loopback at home says so, and has no place beside one that peers can reach. Which
address a host advertises by default, in a network of its own."""

import subprocess
import sys

import pytest

from lighthouse_protocol.refusals import WrongState
from lighthouse_runtime.client.clients import LighthouseClient, ManagerClient
from tests.daemons.elsewhere import Elsewhere, another_host
from tests.processes import MANAGER_CODE, PATIENCE_S, ROOT, Lighthouse, Manager, eventually

AS_ON_DEBIAN = """
import socket
resolve = socket.getaddrinfo
socket.getaddrinfo = lambda host, *more, **options: resolve(
    "127.0.1.1" if host == "myhost" else host, *more, **options
)
"""


JOB = "reach"


def alive(client: LighthouseClient) -> list[str]:
    """Also where its job is not known yet."""
    return [m.replica_id for found in client.status().jobs if found.job == JOB for m in found.members]


@pytest.mark.slow
def test_a_name_that_resolves_to_a_loopback_at_home(lighthouse: Lighthouse) -> None:
    hidden = Manager(
        lighthouse.address, "h", "--job", JOB, "--advertise", "myhost", store="10.0.0.9:1",
        code=AS_ON_DEBIAN + MANAGER_CODE,
    )  # fmt: skip
    with hidden, LighthouseClient(lighthouse.address, job=JOB) as client:
        eventually(lambda: alive(client) == ["h"])
        with Manager(lighthouse.address, "a", "--job", JOB, "--advertise", "10.0.0.8", store="10.0.0.8:29600"):
            eventually(lambda: alive(client) == ["a"])
            port = hidden.address.rpartition(":")[2]
            with ManagerClient(f"127.0.0.1:{port}") as rank, pytest.raises(WrongState) as refused:
                rank.quorum(0, 0, timeout_s=PATIENCE_S)
    assert f"h advertises a name that is a loopback on its own host (http://myhost:{port})" in str(refused.value)
    assert "beside a (http://10.0.0.8:" in str(refused.value)
    assert "--advertise" in str(refused.value)


def advertised(there: Elsewhere, lighthouse: str) -> str:
    """By a manager there, which is told nothing else."""
    code = f"from lighthouse_runtime.net.address import advertised_host; print(advertised_host({lighthouse!r}))"
    command = [*there.command, sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def ip(there: Elsewhere, *arguments: str) -> None:
    subprocess.run(["ip", "-n", there.command[3], *arguments], check=True)


@pytest.mark.slow
def test_a_host_advertises_the_address_that_routes_to_the_lighthouse_or_its_first_global_one() -> None:
    with another_host() as there:
        assert advertised(there, f"{there.here}:29510") == there.there
        for beside in ("localhost:29510", "127.0.0.1:29510", "[::1]:29510"):
            assert advertised(there, beside) == there.there, "peers elsewhere could not reach a loopback"
        ip(there, "addr", "flush", "dev", "eth0")
        ip(there, "addr", "add", "fd00:198:18::2/64", "dev", "eth0", "nodad")
        assert advertised(there, "localhost:29510") == "fd00:198:18::2"
        assert advertised(there, "[fd00:198:18::1]:29510") == "fd00:198:18::2"
        ip(there, "link", "set", "eth0", "down")
        assert advertised(there, "localhost:29510") in ("127.0.0.1", "::1"), "it has nothing else"


RANK = """
import sys, threading, time
from lighthouse_protocol.messages.run import RankHeartbeat, RankHello, RankId, RunTerms
from lighthouse_protocol.refusals import Unreachable
from lighthouse_runtime.client.clients import LighthouseClient

def beat(stream):
    while True:
        stream.send(RankHeartbeat())
        time.sleep(0.5)

with LighthouseClient(sys.argv[1], job="reach", run="vanished") as client:
    stream = client.rank()
    stream.send(RankHello(RankId(0, "p"), RunTerms(), secret="s" * 32))
    threading.Thread(target=beat, args=(stream,), daemon=True).start()
    try:
        for message in stream:
            print(message, flush=True)
    except Unreachable as e:
        print("unreachable:", e)
"""


@pytest.mark.slow
def test_the_stream_to_a_lighthouse_whose_host_has_disappeared_ends_soon() -> None:
    with another_host() as there, Lighthouse("--bind", f"{there.here}:0", "--insecure") as lighthouse:
        address = f"{there.here}:{lighthouse.address.rpartition(':')[2]}"
        command = [*there.command, sys.executable, "-c", RANK, address]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
            try:
                assert rank.stdout is not None
                assert rank.stdout.readline() == "RankWelcome(term=0)\n"
                with there.unplugged():
                    told, _ = rank.communicate(timeout=45)
            finally:
                rank.kill()
        assert told.splitlines()[-1].startswith("unreachable: ")
