"""torchft's released LighthouseClient against our lighthouse."""

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, eventually
from tests.torchft.rounds import members, wait_for_state
from tests.torchft.stock import Stock, StockError, StockTorchft


def together(*joins: "Future[Any]") -> list[Any]:
    return [join.result(30) for join in joins]


def one_quorum(*joins: "Future[Any]") -> tuple[int, list[str]]:
    """(quorum_id, replica ids) of the quorum that every one of `joins` is answered with."""
    answers = together(*joins)
    seen = {(answer["quorum_id"], *(p["replica_id"] for p in answer["participants"])) for answer in answers}
    assert len(seen) == 1, answers
    quorum_id, *names = seen.pop()
    return quorum_id, names


@pytest.fixture
def pair(stock: StockTorchft) -> tuple[Stock, Lighthouse]:
    """A client, and a lighthouse that forms no quorum of less than two."""
    with Lighthouse("--min_replicas", "2", "--heartbeat_timeout_ms", "1000") as lighthouse:
        yield stock.lighthouse_client(lighthouse.address), lighthouse


@pytest.fixture(scope="module")
def unjoined(stock: StockTorchft) -> tuple[Stock, Lighthouse]:
    """A client, and a lighthouse that nobody has joined."""
    with Lighthouse() as lighthouse:
        yield stock.lighthouse_client(lighthouse.address), lighthouse


def test_quorum_and_a_second_step_with_the_same_id(pair: tuple[Stock, Lighthouse]) -> None:
    client, _ = pair
    first = one_quorum(client.join("b"), client.join("a"))
    assert first[1] == ["a", "b"]
    assert one_quorum(client.join("a", step=1), client.join("b", step=1)) == first


def test_the_answer_has_what_each_member_said(pair: tuple[Stock, Lighthouse]) -> None:
    client, _ = pair
    said = {
        "address": "http://10.0.0.7:1234",
        "store_address": "10.0.0.7:29500",
        "step": 7,
        "world_size": 3,
        "data": {"loss": 0.5, "names": ["x", "ü"], "nested": {"k": None}},
    }
    answers = together(client.join("a", **said), client.join("b", world_size=3))
    for answer in answers:
        assert answer["participants"][0] == said | {"replica_id": "a", "shrink_only": False}
        assert answer["participants"][1]["data"] is None
        assert abs(answer["created"]["seconds"] - time.time()) < 60


def test_a_joiner_and_a_leaver_each_move_the_id_up(pair: tuple[Stock, Lighthouse]) -> None:
    client, lighthouse = pair
    first, _ = one_quorum(client.join("a"), client.join("b"))
    newcomer = client.join("c")
    wait_for_state(lighthouse, "c", "joined")
    second, names = one_quorum(client.join("a", step=1), client.join("b", step=1), newcomer)
    assert names == ["a", "b", "c"]
    third, names = one_quorum(client.join("a", step=2), client.join("b", step=2))
    assert names == ["a", "b"]
    assert first < second < third


def test_shrink_only_leaves_the_newcomer_waiting(pair: tuple[Stock, Lighthouse]) -> None:
    client, lighthouse = pair
    first, _ = one_quorum(client.join("a"), client.join("b"))
    newcomer = client.join("c")
    wait_for_state(lighthouse, "c", "joined")
    same = one_quorum(client.join("a", step=1, shrink_only=True), client.join("b", step=1))
    assert same == (first, ["a", "b"])
    assert not newcomer.done()
    _, names = one_quorum(client.join("a", step=2), client.join("b", step=2), newcomer)
    assert names == ["a", "b", "c"]


def test_heartbeats_keep_a_silent_member_waited_for(stock: StockTorchft) -> None:
    timeout_s = 4.0  # a busy machine may delay a heartbeat for longer than the second of the other tests
    with Lighthouse("--min_replicas", "2", "--heartbeat_timeout_ms", str(int(timeout_s * 1000))) as lighthouse:
        client = stock.lighthouse_client(lighthouse.address)
        one_quorum(client.join("a"), client.join("b"))
        answer = client.join("a", step=1)
        eventually(lambda: members(lighthouse)["a"] == "joined", "a has joined again")
        ends_at = time.monotonic() + 1.5 * timeout_s
        while time.monotonic() < ends_at:
            client.do("heartbeat", replica_id="b")
            assert members(lighthouse)["b"] == "straggler"
            time.sleep(0.1)
        assert not answer.done()
        assert one_quorum(answer, client.join("b", step=1))[1] == ["a", "b"]


def test_a_name_with_uuid_is_one_group_with_incarnations(pair: tuple[Stock, Lighthouse]) -> None:
    client, lighthouse = pair
    old, new = (f"a:{n * 8}-{n * 4}-{n * 4}-{n * 4}-{n * 12}" for n in "12")
    first, _ = one_quorum(client.join(old), client.join("b"))
    second, names = one_quorum(client.join(new), client.join("b"))
    assert names == [new, "b"]
    assert second > first
    assert sorted(members(lighthouse)) == ["a", "b"]


def test_a_timeout_raises_timeout_error_with_the_reason(pair: tuple[Stock, Lighthouse]) -> None:
    client, lighthouse = pair
    with pytest.raises(StockError, match=r"too_few_participants.*1 of at least 2 joined") as e:
        client.join("a", timeout=1.0).result(30)
    assert e.value.kind == "TimeoutError"
    eventually(lambda: members(lighthouse)["a"] != "joined", "the join is withdrawn")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"replica_id": ""}, "replica_id: is empty"),
        ({"replica_id": "a b"}, "replica_id: 'a b' has ' '"),
        ({"replica_id": "a", "address": "http://0.0.0.0:1"}, "address: .*not reachable"),
        ({"replica_id": "a", "step": -1}, "step: is -1"),
        ({"replica_id": "a", "data": {"x": "y" * 5000}}, "data: has 50.. bytes"),
    ],
)
def test_a_refusal_raises_at_once_and_names_the_field(
    unjoined: tuple[Stock, Lighthouse], arguments: dict[str, Any], complaint: str
) -> None:
    client, lighthouse = unjoined
    with pytest.raises(StockError, match=complaint) as e:
        client.join(**arguments).result(30)
    assert e.value.kind == "RuntimeError"
    assert members(lighthouse) == {}


def test_the_lighthouse_going_away_raises_with_the_reason(stock: StockTorchft) -> None:
    with Lighthouse("--min-replicas", "2") as lighthouse:
        client = stock.lighthouse_client(lighthouse.address)
        answer = client.join("a")
        wait_for_state(lighthouse, "a", "joined")
        assert lighthouse.stop() == 0
        with pytest.raises(StockError, match="the lighthouse is shutting down"):
            answer.result(30)


def test_a_client_lives_through_a_restart_of_the_lighthouse(stock: StockTorchft) -> None:
    with Lighthouse() as lighthouse:
        client, port = stock.lighthouse_client(lighthouse.address), lighthouse.port
        first, _ = one_quorum(client.join("a"))
        lighthouse.kill()
    with Lighthouse("--bind", f"127.0.0.1:{port}"):

        def again() -> tuple[int, list[str]] | None:
            try:
                return one_quorum(client.join("a", step=1, timeout=2.0))
            except StockError:
                return None

        second, names = eventually(again, "an answer of the new lighthouse")
        assert names == ["a"]
        assert second > first


def test_its_clients_train_by_a_port_of_their_own_beside_tls(stock: StockTorchft, tmp_path: Path) -> None:
    """The lighthouse's own port has TLS and takes tokens: a client without both gets nothing there."""
    options = ("--bind", "[::]:0", "--http", "[::]:0", "--credentials", str(tmp_path / "credentials"))
    plain = ("--torchft-listen", f"{LOCALHOST}:0", "--min-replicas", "2")
    with Lighthouse(*options, *plain, env={"XDG_STATE_HOME": str(tmp_path)}) as lighthouse:
        port = lighthouse.wait_for_log(r"torchft clients are served without TLS on port (\d+)")[1]
        client = stock.lighthouse_client(f"{LOCALHOST}:{port}")
        first = one_quorum(client.join("b"), client.join("a"))
        assert first[1] == ["a", "b"]
        assert one_quorum(client.join("a", step=1), client.join("b", step=1)) == first
        groups = [stock.manager_server(name, f"{LOCALHOST}:{port}") for name in ("c", "d")]
        ranks = [stock.manager_client(group.do("address")) for group in groups]
        answers = [rank.ask(step=2) for rank in ranks]
        assert {each.result(PATIENCE_S)["replica_world_size"] for each in answers} <= {2, 3, 4}
        with pytest.raises(StockError):
            stock.lighthouse_client(lighthouse.address).join("e", timeout=2.0).result(PATIENCE_S)
