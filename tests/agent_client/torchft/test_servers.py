"""The servers as torchft's Python uses them: addresses, and lives that end when torchft's would."""

import contextlib
import os
import re
import resource
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from agent_client.torchft import LighthouseClient, LighthouseServer, ManagerClient, ManagerServer
from examples.ports import free_port
from lighthouse_protocol.identity import Address
from lighthouse_protocol.messages.status import MemberState
from lighthouse_runtime.client.clients import LighthouseClient as NativeLighthouseClient
from lighthouse_runtime.client.clients import ManagerClient as NativeManagerClient
from lighthouse_runtime.net.address import own_name
from lighthouse_runtime.security.client_tls import variables_of
from tests.daemons.mutual_tls import WORKER, Site
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, Process, eventually
from tests.torchft.stock import StockTorchft, require

LONG = timedelta(seconds=PATIENCE_S)


def manager_server(lighthouse: str, replica_id: str = "a", **more: Any) -> ManagerServer:
    usual: dict[str, Any] = {
        "hostname": LOCALHOST,
        "bind": f"{LOCALHOST}:0",
        "store_addr": f"{LOCALHOST}:1",
        "world_size": 1,
    }
    usual |= {"heartbeat_interval": timedelta(milliseconds=100), "connect_timeout": LONG, "quorum_retries": 0}
    return ManagerServer(replica_id=replica_id, lighthouse_addr=lighthouse, **(usual | more))


def is_listening(address: str) -> bool:
    host, port = address.removeprefix("http://").rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def has_ended(address: str) -> bool:
    return not is_listening(address)


def states(looks: NativeLighthouseClient) -> dict[str, MemberState]:
    return {member.replica_id: member.state for job in looks.status().jobs for member in job.members}


# -- addresses


def test_files_of_ones_own_pki_are_found_by_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clients of the lighthouse, and by the manager that is started; a manager itself has no TLS."""
    site = Site(tmp_path)
    with site.lighthouse:
        with pytest.raises(RuntimeError, match="does not answer within 2 s"):
            LighthouseClient(site.address, timedelta(seconds=2))
        for name, path in variables_of(site.pki.files(site.pki.issue("torchft", WORKER))).items():
            monkeypatch.setenv(name, path)
        LighthouseClient(site.address, LONG).heartbeat("a")
        server = manager_server(site.address, "b")
        ManagerClient(server.address(), LONG)
        server.shutdown()


def test_a_lighthouse_on_a_free_port_says_where_it_is() -> None:
    server = LighthouseServer(f"{LOCALHOST}:0", 1)
    assert re.fullmatch(rf"http://{LOCALHOST}:\d+", server.address())
    LighthouseClient(server.address(), LONG).heartbeat("a")
    server.shutdown()


@pytest.mark.parametrize("bind", ["[::]:0", "0.0.0.0:0", ":0"])
def test_a_lighthouse_on_every_address_names_its_host(bind: str) -> None:
    server = LighthouseServer(bind=bind, min_replicas=1)
    assert server.address().startswith(f"http://{Address(own_name(), None)}:")
    server.shutdown()


def test_a_lighthouse_takes_torchfts_times() -> None:
    """c is alive and does not ask. Their default join timeout is 100 ms, that of `lighthouse serve` a minute."""
    for times in ({}, {"join_timeout_ms": 100, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 300}):
        server = LighthouseServer(f"{LOCALHOST}:0", 1, **times)
        client = LighthouseClient(server.address(), LONG)
        client.heartbeat("c")
        assert [m.replica_id for m in client.quorum("a", LONG / 2).participants] == ["a"]
        if times:
            with NativeLighthouseClient(server.address()) as looks:
                eventually(lambda: states(looks).get("c") is MemberState.EXPIRED, "c expires")
        server.shutdown()


def test_a_manager_advertises_its_host_name_and_joins_under_its_name_without_torchfts_uuid() -> None:
    """A group that comes back with another uuid is the same group."""
    name = "a:0f8fad5b-d9cb-469f-a165-70867728950e"
    with Lighthouse() as lighthouse:
        server = manager_server(f"http://{lighthouse.address}", name, hostname="localhost", bind="[::]:0")
        assert re.fullmatch(r"http://localhost:\d+", server.address())
        ManagerClient(server.address(), LONG)
        with NativeManagerClient(server.address()) as looks:
            assert looks.status().replica_id == "a"
        server.shutdown()


# -- what goes wrong at the start


def test_a_port_that_is_taken_is_a_runtime_error(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        with pytest.raises(RuntimeError, match=r"did not start \(status 1\)"):
            LighthouseServer(f"{LOCALHOST}:{taken.getsockname()[1]}", 1)
    assert "--bind" in capfd.readouterr().err


def test_a_manager_without_its_lighthouse_is_a_runtime_error_in_time() -> None:
    with pytest.raises(RuntimeError, match=r"^failed to connect: .*within 0.2 s"):
        manager_server(f"http://{LOCALHOST}:{free_port()}", connect_timeout=timedelta(milliseconds=200))


def test_a_manager_under_torchfts_lighthouse_is_a_runtime_error_that_says_so() -> None:
    require()
    with StockTorchft() as stock:
        theirs = stock.new("LighthouseServer", bind=f"{LOCALHOST}:0", min_replicas=1)
        port = theirs.do("address").rpartition(":")[2]
        with pytest.raises(RuntimeError, match="is not a Lighthouse server .*lighthouse serve"):
            manager_server(f"http://{LOCALHOST}:{port}")


def test_a_name_that_nobody_may_have_is_a_runtime_error(capfd: pytest.CaptureFixture[str]) -> None:
    with Lighthouse() as lighthouse, pytest.raises(RuntimeError, match="did not start"):
        manager_server(lighthouse.address, "has a space")
    assert "--replica-id" in capfd.readouterr().err


def test_what_no_command_line_can_say_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="null byte"):
        LighthouseServer("\0:0", 1)


def test_a_process_with_a_thousand_open_files_starts_servers() -> None:
    with contextlib.ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        LighthouseServer(f"{LOCALHOST}:0", 1).shutdown()


# -- how it ends


def test_shutdown_returns_when_it_has_ended_and_may_be_repeated() -> None:
    server = LighthouseServer(f"{LOCALHOST}:0", 1)
    server.shutdown()
    assert has_ended(server.address())
    server.shutdown()
    again = LighthouseServer(server.address().removeprefix("http://"), 1)  # its port is free at once
    again.shutdown()


def test_a_server_ends_with_its_last_reference() -> None:
    server = LighthouseServer(f"{LOCALHOST}:0", 1)
    address = server.address()
    del server
    eventually(lambda: has_ended(address), "the server has ended")


def test_a_server_outlives_the_thread_that_made_it() -> None:
    made: list[LighthouseServer] = []
    maker = threading.Thread(target=lambda: made.append(LighthouseServer(f"{LOCALHOST}:0", 1)))
    maker.start()
    maker.join()
    LighthouseClient(made[0].address(), LONG).heartbeat("a")
    assert is_listening(made[0].address())
    made[0].shutdown()


OWNER = """
import sys, time
from datetime import timedelta
from agent_client.torchft import LighthouseServer, ManagerClient, ManagerServer
LONG = timedelta(seconds=60)
lighthouse = sys.argv[1] or LighthouseServer("127.0.0.1:0", 1)
named = lighthouse if isinstance(lighthouse, str) else lighthouse.address()
manager = ManagerServer("a", named, "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 1, LONG / 600, LONG, 0)
ManagerClient(manager.address(), LONG)._quorum(0, 0, "", False, True, 0, LONG)
print("owner of", named, manager.address(), flush=True)
if sys.argv[2] == "waits":
    time.sleep(600)
raise SystemExit("ends by itself" if sys.argv[2] == "raises" else 0)
"""


@pytest.mark.parametrize(("how", "status"), [("returns", 0), ("raises", 1), ("waits", None)])
def test_servers_end_with_a_process_that_ends_or_is_killed(how: str, status: int | None) -> None:
    with Process(OWNER, ["", how]) as owner:
        said = owner.wait_for_log(r"owner of (\S+) (\S+)")
        if status is None:
            owner.kill()
        else:
            assert owner.wait() == status
            assert [has_ended(said[1]), has_ended(said[2])] == [True, True], "at its own end, before it"
        eventually(lambda: has_ended(said[1]) and has_ended(said[2]), "both have ended")


def test_a_group_whose_process_is_killed_has_left_at_once() -> None:
    """The others do not wait for its heartbeats to stop."""
    patient = Lighthouse("--heartbeat-timeout", "600s")
    with patient as lighthouse, Process(OWNER, [lighthouse.address, "waits"]) as owner:
        owner.wait_for_log("owner of")
        with NativeLighthouseClient(lighthouse.address) as looks:
            assert states(looks) == {"a": MemberState.PARTICIPANT}
            owner.kill()
            is_gone = lambda: states(looks).get("a", MemberState.EXPIRED) is MemberState.EXPIRED  # noqa: E731
            eventually(is_gone, "the group is gone", within_s=20.0)  # a manager's own patience is 30 s


def test_what_torchft_has_no_argument_for_is_read_from_the_environment() -> None:
    """A trainer that hangs is missed when it has asked for nothing for so long."""
    hangs = {"LIGHTHOUSE_MANAGER_RANK_TIMEOUT": "500ms"}
    with Lighthouse() as lighthouse, Process(OWNER, [lighthouse.address, "waits"], env=hangs) as owner:
        owner.wait_for_log("owner of")
        with NativeLighthouseClient(lighthouse.address) as looks:
            eventually(lambda: states(looks)["a"] is MemberState.DOWN, "the group counts as down")


def test_who_kills_the_group_ends_its_process() -> None:
    """As torchft's does: `lighthouse kill` ends the trainer, whatever it is waiting for."""
    with Lighthouse() as lighthouse, Process(OWNER, [lighthouse.address, "waits"]) as owner:
        owner.wait_for_log("owner of")
        with NativeLighthouseClient(lighthouse.address) as kills:
            kills.kill("a", "for the test")
        assert owner.wait() == 1
        assert "the group's manager was killed" in owner.log()
