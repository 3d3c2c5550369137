"""Requests that cannot be done: a clear error names the field, nothing changes, nothing hangs."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from grpc import StatusCode

from lighthouse_protocol.limits import MAX_REQUEST_BYTES
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_runtime.client.lighthouse import LighthouseClient
from lighthouse_runtime.client.manager import ManagerClient
from tests.daemons.wire import call, member, rank, refused, snapshot
from tests.processes import LOCALHOST, Lighthouse, Manager, Process, eventually

INVALID = StatusCode.INVALID_ARGUMENT
QUORUM = "/lighthouse.v1.LighthouseService/Quorum"
BEAT = "/lighthouse.v1.LighthouseService/Heartbeat"
STATUS = "/lighthouse.v1.LighthouseService/Status"
KILL = "/lighthouse.v1.LighthouseService/Kill"
LONG = "x" * 100_000

Case = tuple[str, Any, StatusCode, str]


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    """With groups a and b in a quorum at step 5; nobody lapses."""
    with Lighthouse("--heartbeat-timeout", "1h", "--min-replicas", "2") as process, ThreadPoolExecutor() as pool:
        first = pool.submit(call, process.address, QUORUM, member("a"))
        call(process.address, QUORUM, member("b"))
        first.result(30)
        yield process


@pytest.fixture(autouse=True)
def changes_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    names = {"lighthouse", "manager"} & set(request.fixturenames)
    daemons = [request.getfixturevalue(name) for name in names]
    before = [snapshot(daemon) for daemon in daemons]
    yield
    assert [snapshot(daemon) for daemon in daemons] == before
    for daemon in daemons:
        assert "Traceback" not in daemon.log()


MEMBERS: list[tuple[dict[str, Any], str]] = [
    ({"replica_id": ""}, "replica_id: is empty"),
    ({"replica_id": "x" * 129}, "replica_id: has 129 characters; at most 128"),
    ({"replica_id": "a b"}, "replica_id: 'a b' has ' '; allowed are A-Z"),
    ({"replica_id": "a\n"}, r"replica_id: 'a\n' has '\n'"),
    ({"incarnation": "1 2"}, "incarnation: '1 2' has ' '"),
    ({"address": "not an address"}, "address: 'not an address' is not an address; write host:port"),
    ({"address": "host:99999"}, "address: 'host:99999' has no valid port; a port is a number from 0 to 65535"),
    ({"address": "x" * 513}, "address: has 513 characters; at most 512"),
    ({"address": "0.0.0.0:1"}, "address: '0.0.0.0:1' is nobody's address; advertise one"),
    ({"store_address": "a b:1"}, "store_address: 'a b:1' is not an address"),
    ({"address": "fe80::1%\n"}, "address: "),
    ({"step": -1}, "step: is -1; it counts from 0"),
    ({"world_size": 0}, "world_size: is 0; a group has 1 to 65536 ranks"),
    ({"world_size": 2**64 - 1}, "world_size: is 18446744073709551615"),
    ({"data": "ü" * 2049}, "data: has 4098 bytes; at most 4096"),
    ({"commit_failures": -1}, "commit_failures: is -1; it counts from 0"),
    ({"tag_quorum_id": -1}, "tag_quorum_id: is -1; quorum ids are 0 to"),
    ({"seen_quorum_id": 2**63 - 1}, "seen_quorum_id: is 9223372036854775807"),
]


@pytest.mark.parametrize(("fields", "complaint"), MEMBERS, ids=[complaint[:40] for _, complaint in MEMBERS])
def test_a_malformed_member(lighthouse: Lighthouse, fields: dict[str, Any], complaint: str) -> None:
    status, details = refused(lighthouse.address, QUORUM, member(**({"replica_id": "c"} | fields)), timeout_s=2.0)
    assert status is INVALID
    assert details.startswith(complaint)
    assert details.isprintable()


def test_a_member_that_is_missing(lighthouse: Lighthouse) -> None:
    empty = lighthouse_pb2.LighthouseQuorumRequest()
    assert refused(lighthouse.address, QUORUM, empty) == (INVALID, "requester: is missing; say who asks")
    for path in ("/LighthouseService/Quorum", "/torchft.LighthouseService/Quorum"):
        assert refused(lighthouse.address, path, b"") == (INVALID, "requester: is missing; say who asks")


OTHERS: list[Case] = [
    (QUORUM, b"\xff\xff\xff", INVALID, "request: 3 bytes are no lighthouse.v1.LighthouseQuorumRequest"),
    (QUORUM, bytes(MAX_REQUEST_BYTES + 1), StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    (QUORUM, member("a", step=4, incarnation="x" * 200), INVALID, "incarnation: has 200 characters"),
    (QUORUM, member("c", world_size=3), StatusCode.FAILED_PRECONDITION, "world_size: c has 3 ranks, a has 2: "),
    (
        QUORUM,
        member("c", address="127.0.0.1:1"),
        StatusCode.FAILED_PRECONDITION,
        "address: c advertises a loopback (127.0.0.1:1) beside a (10.0.0.1:1)",
    ),
    (BEAT, lighthouse_pb2.LighthouseHeartbeatRequest(), INVALID, "replica_id: is empty"),
    (BEAT, lighthouse_pb2.LighthouseHeartbeatRequest(replica_id="a b"), INVALID, "replica_id: 'a b' has ' '"),
    (
        BEAT,
        lighthouse_pb2.LighthouseHeartbeatRequest(replica_id="a", incarnation="/ /"),
        INVALID,
        "incarnation: '/ /' has ' '",
    ),
    (
        STATUS,
        lighthouse_pb2.LighthouseStatusRequest(job="z"),
        StatusCode.NOT_FOUND,
        "no replica group has asked",
    ),
    (STATUS, lighthouse_pb2.LighthouseStatusRequest(job=LONG), INVALID, "job: has 100000 characters"),
    (KILL, lighthouse_pb2.LighthouseKillRequest(), INVALID, "replica_id: is empty"),
    (
        KILL,
        lighthouse_pb2.LighthouseKillRequest(replica_id="z"),
        StatusCode.NOT_FOUND,
        "replica_id: no live replica group 'z'; alive: a, b",
    ),
    (
        KILL,
        lighthouse_pb2.LighthouseKillRequest(replica_id="a", job="z"),
        StatusCode.NOT_FOUND,
        "no replica group has",
    ),
    ("/lighthouse.v1.LighthouseService/Nothing", b"", StatusCode.UNIMPLEMENTED, "Method not found!"),
    ("/torchft.ManagerService/Quorum", b"", StatusCode.UNIMPLEMENTED, "Method not found!"),
    ("/", b"", StatusCode.UNIMPLEMENTED, ""),
    (
        "/torchft.LighthouseService/Quorum",
        torchft_pb2.LighthouseQuorumRequest(requester=torchft_pb2.QuorumMember(replica_id="a b")),
        INVALID,
        "replica_id: 'a b' has ' '",
    ),
    (
        "/torchft.LighthouseService/Heartbeat",
        torchft_pb2.LighthouseHeartbeatRequest(replica_id=""),
        INVALID,
        "replica_id: is empty",
    ),
]


@pytest.mark.parametrize(
    ("path", "request_", "code", "complaint"), OTHERS, ids=[f"{path}-{text[:30]}" for path, _, _, text in OTHERS]
)
def test_a_request_that_the_lighthouse_refuses(
    lighthouse: Lighthouse, path: str, request_: Any, code: StatusCode, complaint: str
) -> None:
    status, details = refused(lighthouse.address, path, request_)
    assert (status, complaint in details) == (code, True), (status, details)
    assert len(details) < 2000


def test_a_quorum_without_a_deadline(lighthouse: Lighthouse) -> None:
    for path in (QUORUM, "/LighthouseService/Quorum", "/torchft.LighthouseService/Quorum"):
        status, details = refused(lighthouse.address, path, member("c"), timeout_s=None)
        assert (status, "missing timeout; set a deadline" in details) == (INVALID, True)


@pytest.mark.parametrize("job", ["a b", "x" * 129, "{}"])
def test_an_odd_job(lighthouse: Lighthouse, job: str) -> None:
    status, details = refused(lighthouse.address, QUORUM, member("c"), metadata=[("lighthouse-job", job)])
    assert (status, details.startswith("job: ")) == (INVALID, True)


def test_a_step_that_goes_back_with_the_same_incarnation() -> None:
    with Lighthouse() as process:
        call(process.address, QUORUM, member("a", step=7, incarnation="1"))
        before = snapshot(process)
        status, details = refused(process.address, QUORUM, member("a", step=6, incarnation="1"))
        assert (status, details) == (
            INVALID,
            "step: of a went from 7 back to 6; a group that lost its state takes a new incarnation "
            "(restart its manager)",
        )
        assert snapshot(process) == before


def test_a_member_that_carries_more_than_its_fields_is_refused(lighthouse: Lighthouse) -> None:
    """Unknown fields are relayed to everybody: one member must not make the answer too big for all."""
    unknown = b"\xaa\x06" + _varint(200_000) + bytes(200_000)  # field 101, a string
    inner = member("c").requester.SerializeToString() + unknown
    request = b"\x0a" + _varint(len(inner)) + inner
    status, details = refused(lighthouse.address, QUORUM, request, timeout_s=2.0)
    assert (status, "requester: has 200" in details) == (INVALID, True), (status, details)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


# -- the manager

MQUORUM = "/manager.v1.ManagerService/Quorum"
VOTE = "/manager.v1.ManagerService/ShouldCommit"
CHECKPOINT = "/manager.v1.ManagerService/CheckpointAddress"


@pytest.fixture(scope="module")
def manager(group: Manager) -> Manager:
    return group


@pytest.fixture(scope="module")
def group() -> Iterator[Manager]:
    """Two ranks, at step 10 in a quorum."""
    with Lighthouse() as lighthouse, Manager(lighthouse.address, ranks=2) as process, ThreadPoolExecutor() as pool:
        with ManagerClient(process.address) as client:
            first = pool.submit(client.quorum, 0, 10, "here", timeout_s=30)
            client.quorum(1, 10, timeout_s=30)
            first.result(30)
            eventually(lambda: client.status().lighthouse_reachable, "a heartbeat was answered")
        yield process


def vote(group_rank: int = 0, step: int = 10, **fields: Any) -> manager_pb2.ShouldCommitRequest:
    return manager_pb2.ShouldCommitRequest(rank=group_rank, step=step, should_commit=True, **fields)


RANKS: list[Case] = [
    (MQUORUM, rank(2), INVALID, "rank: is 2; the group has ranks 0 to 1 (--group-world-size)"),
    (MQUORUM, rank(step=-1), INVALID, "step: is -1; it counts from 0"),
    (MQUORUM, rank(step=9), INVALID, "step: of rank 0 went from 10 back to 9"),
    (MQUORUM, rank(commit_failures=-1), INVALID, "commit_failures: is -1"),
    (MQUORUM, rank(checkpoint_server_addr=LONG), INVALID, "checkpoint_server_addr: has 100000 characters"),
    (MQUORUM, rank(rank_incarnation=LONG), INVALID, "rank_incarnation: has 100000 characters"),
    (MQUORUM, rank(tag_quorum_id=-1), INVALID, "tag_quorum_id: is -1"),
    (MQUORUM, bytes(MAX_REQUEST_BYTES + 1), StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    (MQUORUM, b"\xff", INVALID, "request: 1 bytes are no manager.v1.ManagerQuorumRequest"),
    (VOTE, vote(2), INVALID, "rank: is 2; the group has ranks 0 to 1"),
    (VOTE, vote(step=-1), INVALID, "step: is -1"),
    (VOTE, vote(step=11), StatusCode.FAILED_PRECONDITION, "step: the vote is for step 11, the step in flight is 10"),
    (VOTE, vote(quorum_id=7), StatusCode.FAILED_PRECONDITION, "quorum_id: the vote is for quorum 7, the one in force"),
    (CHECKPOINT, manager_pb2.CheckpointAddressRequest(rank=2), INVALID, "rank: is 2"),
    (
        CHECKPOINT,
        manager_pb2.CheckpointAddressRequest(rank=0, step=9),
        StatusCode.FAILED_PRECONDITION,
        "step: rank 0 is at step 10, not at 9",
    ),
    (
        "/torchft.ManagerService/Quorum",
        torchft_pb2.ManagerQuorumRequest(group_rank=2),
        INVALID,
        "rank: is 2; the group has ranks 0 to 1",
    ),
    (
        "/torchft.ManagerService/Quorum",
        torchft_pb2.ManagerQuorumRequest(checkpoint_metadata=LONG),
        INVALID,
        "checkpoint_metadata: has 100000 characters",
    ),
    (
        "/torchft.ManagerService/CheckpointMetadata",
        torchft_pb2.CheckpointMetadataRequest(rank=-1),
        INVALID,
        "rank: is -1",
    ),
    ("/manager.v1.ManagerService/Nothing", b"", StatusCode.UNIMPLEMENTED, "Method not found!"),
    ("/lighthouse.v1.LighthouseService/Quorum", b"", StatusCode.UNIMPLEMENTED, "Method not found!"),
]


@pytest.mark.parametrize(
    ("path", "request_", "code", "complaint"), RANKS, ids=[f"{path}-{text[:30]}" for path, _, _, text in RANKS]
)
def test_a_request_that_the_manager_refuses(
    manager: Manager, path: str, request_: Any, code: StatusCode, complaint: str
) -> None:
    status, details = refused(manager.address, path, request_, timeout_s=2.0)
    assert (status, complaint in details) == (code, True), (status, details)


def test_a_rank_or_a_vote_without_a_deadline(manager: Manager) -> None:
    for service in ("manager.v1.ManagerService", "ManagerService", "torchft.ManagerService"):
        for request in (("Quorum", rank()), ("ShouldCommit", vote())):
            status, details = refused(manager.address, f"/{service}/{request[0]}", request[1], timeout_s=None)
            assert (status, "missing timeout" in details) == (INVALID, True)


def test_a_rank_that_has_not_asked_has_no_checkpoint() -> None:
    with Manager("127.0.0.1:1") as process:
        status, details = refused(process.address, CHECKPOINT, manager_pb2.CheckpointAddressRequest(rank=0))
        assert status is StatusCode.FAILED_PRECONDITION
        assert details == "rank: rank 0 has not asked for a quorum yet; ask again once it has"


def test_an_unreachable_lighthouse_is_named_by_status_and_readiness() -> None:
    with Manager("127.0.0.1:1") as process, ManagerClient(process.address) as client:
        status = eventually(lambda: (s := client.status()).lighthouse_error != "not connected yet" and s, "an attempt")
        assert not status.lighthouse_reachable
        assert "127.0.0.1:1 is unreachable" in status.lighthouse_error
        process.wait_for_log("lighthouse.*127.0.0.1:1 is unreachable")


# -- at the start


def _ends(process: Process) -> tuple[int, str]:
    process.launch()
    try:
        return process.wait(), process.log()
    finally:
        process.close()


@pytest.mark.parametrize("option", ["--bind", "--http"])
@pytest.mark.parametrize("kind", ["lighthouse", "manager"])
def test_a_port_that_is_taken_ends_the_start_with_its_option(kind: str, option: str) -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        where = f"{LOCALHOST}:{taken.getsockname()[1]}"
        daemon = Lighthouse(option, where) if kind == "lighthouse" else Manager("127.0.0.1:1", "a", option, where)
        status, log = _ends(daemon)
    assert status == 1
    assert f"Error: {option}: cannot listen on {where}" in log
    assert "choose another" in log
    assert "Traceback" not in log


def test_one_daemon_does_not_take_the_port_of_another(lighthouse: Lighthouse) -> None:
    """gRPC's so_reuseport would let two of them share it."""
    status, log = _ends(Lighthouse("--bind", lighthouse.address))
    assert (status, f"--bind: cannot listen on {lighthouse.address}" in log) == (1, True)


def test_an_address_of_another_host_cannot_be_bound() -> None:
    for option in ("--bind", "--http"):
        status, log = _ends(Lighthouse(option, "192.0.2.77:4000"))
        assert (status, f"Error: {option}: cannot listen on 192.0.2.77:4000" in log, "Traceback" in log) == (
            1,
            True,
            False,
        )


def test_a_well_formed_request_is_done() -> None:
    """The control of all above."""
    with Lighthouse("--heartbeat-timeout", "1h") as process, LighthouseClient(process.address) as client:
        assert client.quorum(Participant("c", group_world_size=2), timeout_s=30).participants[0].replica_id == "c"
