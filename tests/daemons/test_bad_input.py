"""Requests that cannot be done: a clear error names the field, nothing changes, nothing hangs.

What is checked of a member stands in lighthouse_protocol/wire/test_documented.py, of a rank and a vote in
manager/group/*.txt; here only what the services add to that.
"""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_runtime.client.clients import ManagerClient
from tests.daemons.wire import call, member, rank, refused, snapshot
from tests.lighthouse_protocol.builders import field
from tests.processes import LOCALHOST, Lighthouse, Manager, Process, eventually

INVALID = StatusCode.INVALID_ARGUMENT
L, L_BARE, L_TORCHFT = [f"/{package}LighthouseService/" for package in ("lighthouse.v1.", "", "torchft.")]
M, M_BARE, M_TORCHFT = [f"/{package}ManagerService/" for package in ("manager.v1.", "", "torchft.")]
NOWHERE = f"{LOCALHOST}:1"
LONG = "x" * 100_000

Beat = lighthouse_pb2.LighthouseHeartbeatRequest


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    """With group a in a quorum at step 5; nobody lapses."""
    with Lighthouse("--heartbeat-timeout", "1h") as process:
        call(process.address, L + "Quorum", member("a", incarnation="1"))
        yield process


@pytest.fixture(scope="module")
def manager() -> Iterator[Manager]:
    """Two ranks, at step 10 in a quorum."""
    with Lighthouse() as lighthouse, Manager(lighthouse.address, ranks=2) as process, ThreadPoolExecutor() as pool:
        with ManagerClient(process.address) as client:
            first = pool.submit(client.quorum, 0, 10, "here", timeout_s=30)
            client.quorum(1, 10, timeout_s=30)
            first.result(30)
            eventually(lambda: client.status().lighthouse_reachable, "a heartbeat was answered")
        yield process


@pytest.fixture(autouse=True)
def changes_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    daemons = [request.getfixturevalue(name) for name in {"lighthouse", "manager"} & set(request.fixturenames)]
    before = [snapshot(daemon) for daemon in daemons]
    yield
    assert [snapshot(daemon) for daemon in daemons] == before
    for daemon in daemons:
        assert "Traceback" not in daemon.log()


# Unknown fields are relayed to everybody: one member must not make the answer too big for all.
CARRIES_MUCH = field(1, member("c").requester.SerializeToString() + field(101, bytes(200_000)))
OF_A_LIGHTHOUSE: list[tuple[str, Any, str]] = [
    (L + "Quorum", member("a\n"), r"replica_id: 'a\n' has '\n'"),
    (L + "Quorum", b"", "requester: is missing; name the replica group that joins"),
    (L + "Quorum", CARRIES_MUCH, "requester: has 200"),
    (L + "Quorum", member("a", step=4, incarnation="1"), "step: of a went from 5 back to 4; a group that lost its sta"),
    (L_TORCHFT + "Quorum", b"", "requester: is missing; name the replica group that joins"),
    (
        L_TORCHFT + "Quorum",
        torchft_pb2.LighthouseQuorumRequest(requester=torchft_pb2.QuorumMember(replica_id="a b")),
        "replica_id: 'a b' has ' '",
    ),
    (L + "Heartbeat", Beat(replica_id="a b"), "replica_id: 'a b' has ' '"),
    (L + "Heartbeat", Beat(replica_id="a", incarnation="/ /"), "incarnation: '/ /' has ' '"),
    (L_TORCHFT + "Heartbeat", torchft_pb2.LighthouseHeartbeatRequest(replica_id=""), "replica_id: is empty"),
    (L + "Status", lighthouse_pb2.LighthouseStatusRequest(job=LONG), "job: has 100000 characters"),
    (L + "Kill", lighthouse_pb2.LighthouseKillRequest(), "replica_id: is empty"),
]


@pytest.mark.parametrize(("path", "request_", "complaint"), OF_A_LIGHTHOUSE, ids=lambda x: str(x)[:40])
def test_a_request_that_the_lighthouse_refuses(
    lighthouse: Lighthouse, path: str, request_: Any, complaint: str
) -> None:
    status, details = refused(lighthouse.address, path, request_, timeout_s=2.0)
    assert (status, details.startswith(complaint), len(details) < 2000) == (INVALID, True, True), (status, details)


def test_an_odd_job(lighthouse: Lighthouse) -> None:
    status, details = refused(lighthouse.address, L + "Quorum", member("c"), metadata=[("lighthouse-job", "a b")])
    assert (status, details.startswith("job: ")) == (INVALID, True)


OF_A_MANAGER: list[tuple[str, Any, str]] = [
    (M + "Quorum", rank(2), "rank: is 2; the group has ranks 0 to 1 (--group-world-size)"),
    (M + "Quorum", rank(commit_failures=-1), "commit_failures: is -1"),
    (M + "Quorum", rank(checkpoint_server_addr=LONG), "checkpoint_server_addr: has 100000 characters"),
    (M + "Quorum", rank(rank_incarnation=LONG), "rank_incarnation: has 100000 characters"),
    (M + "Quorum", rank(tag_quorum_id=-1), "tag_quorum_id: is -1"),
    (M + "ShouldCommit", manager_pb2.ShouldCommitRequest(rank=2), "rank: is 2"),
    (M + "CheckpointAddress", manager_pb2.CheckpointAddressRequest(rank=2), "rank: is 2"),
    (M_TORCHFT + "Quorum", torchft_pb2.ManagerQuorumRequest(group_rank=2), "rank: is 2"),
    (
        M_TORCHFT + "Quorum",
        torchft_pb2.ManagerQuorumRequest(checkpoint_metadata=LONG),
        "checkpoint_metadata: has 100000 characters",
    ),
    (M_TORCHFT + "CheckpointMetadata", torchft_pb2.CheckpointMetadataRequest(rank=-1), "rank: is -1"),
]


@pytest.mark.parametrize(("path", "request_", "complaint"), OF_A_MANAGER, ids=lambda x: str(x)[:40])
def test_a_request_that_the_manager_refuses(manager: Manager, path: str, request_: Any, complaint: str) -> None:
    status, details = refused(manager.address, path, request_, timeout_s=2.0)
    assert (status, details.startswith(complaint)) == (INVALID, True), (status, details)


def test_without_a_deadline(lighthouse: Lighthouse, manager: Manager) -> None:
    asked = [(lighthouse, service + "Quorum", member("c")) for service in (L, L_BARE, L_TORCHFT)]
    asked += [(manager, service + "Quorum", rank()) for service in (M, M_BARE, M_TORCHFT)]
    vote = manager_pb2.ShouldCommitRequest(step=10, should_commit=True)
    asked += [(manager, service + "ShouldCommit", vote) for service in (M, M_BARE, M_TORCHFT)]
    for daemon, path, request in asked:
        status, details = refused(daemon.address, path, request, timeout_s=None)
        assert (status, "no deadline; set one" in details) == (INVALID, True)


def test_an_unreachable_lighthouse_is_named_by_status_and_log() -> None:
    with Manager(NOWHERE) as process, ManagerClient(process.address) as client:
        status = eventually(lambda: (s := client.status()).lighthouse_error != "not connected yet" and s, "an attempt")
        assert not status.lighthouse_reachable
        assert f"{NOWHERE} is unreachable" in status.lighthouse_error
        process.wait_for_log(f"lighthouse.*{NOWHERE} is unreachable")


# -- at the start


def _does_not_start(process: Process, complaint: str) -> None:
    process.launch()
    try:
        assert process.wait() == 1
        assert f"Error: {complaint}" in process.log()
        assert "Traceback" not in process.log()
    finally:
        process.close()


def test_a_port_that_is_taken_ends_the_start_with_its_option() -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        where = f"{LOCALHOST}:{taken.getsockname()[1]}"
        for option in ("--bind", "--http"):
            for daemon in (Lighthouse(option, where), Manager(NOWHERE, "a", option, where)):
                _does_not_start(daemon, f"{option}: cannot listen on {where}")


def test_a_start_that_fails_leaves_no_journal_behind_that_was_made_for_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    options = "--journal", str(journal)
    with socket.create_server((LOCALHOST, 0)) as taken:
        where = f"{LOCALHOST}:{taken.getsockname()[1]}"
        for option in ("--bind", "--http"):
            _does_not_start(Lighthouse(option, where, *options), f"{option}: cannot listen on {where}")
            assert not list(tmp_path.glob("journal*"))
        with Lighthouse(*options):
            pass
        _does_not_start(Lighthouse("--http", where, *options), f"--http: cannot listen on {where}")
    assert list(tmp_path.glob("journal*")) == [journal]


def test_one_daemon_does_not_take_the_port_of_another(lighthouse: Lighthouse) -> None:
    """gRPC's so_reuseport would let two of them share it."""
    _does_not_start(Lighthouse("--bind", lighthouse.address), f"--bind: cannot listen on {lighthouse.address}")
