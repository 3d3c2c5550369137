"""torchrun itself with our backend: nodes die, come, fail and finish; the script knows nothing of it."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client.clients import LighthouseClient
from lighthouse_runtime.security.credentials import Tokens, load_or_make
from tests.agent_client.torchrun.nodes import TorchrunNode, rounds, run_together
from tests.daemons.secured import EVERYWHERE, Secured
from tests.processes import Lighthouse, eventually

pytestmark = pytest.mark.timeout(600)

LOADED = ("--rdzv-conf", "loss_timeout=20")  # on a busy machine a loss is heard later


class Start(Protocol):
    def __call__(self, name: str, *options: str, nodes: str = "2:3") -> TorchrunNode: ...


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse() as lighthouse:
        yield lighthouse


@pytest.fixture
def start(lighthouse: Lighthouse, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(name: str, *options: str, nodes: str = "2:3") -> TorchrunNode:
            node = TorchrunNode(name, lighthouse.address, tmp_path, nodes, options)
            stack.callback(node.close)
            node.launch()
            return node

        yield start


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_node_dies_whichever_it_is(start: Start, tmp_path: Path, rank: int) -> None:
    """With torchrun's default of no restarts: a loss elsewhere is none. The node comes back, then all finish."""
    nodes = [start(name, *LOADED) for name in ("a", "b", "c")]
    places = run_together(nodes)
    assert {place.restarts for place in places.values()} == {0}
    [victim] = [node for node in nodes if places[node.name].rank == rank]
    others = [node for node in nodes if node is not victim]
    before = rounds(nodes)
    victim.die()
    assert {place.restarts for place in run_together(others, after=before).values()} == {0}
    before = rounds(others)
    nodes = [*others, start(victim.name, *LOADED)]
    run_together(nodes, after=before)
    (tmp_path / "finish").touch()
    assert [node.wait() for node in nodes] == [0, 0, 0]


@pytest.mark.slow
def test_two_become_four_and_two_again(start: Start, tmp_path: Path) -> None:
    few = [start(name, "--rdzv-conf", "last_call_timeout=1", nodes="2:4") for name in ("a", "b")]
    run_together(few)
    before = rounds(few)
    more = [start(name, "--rdzv-conf", "last_call_timeout=1", nodes="2:4") for name in ("c", "d")]
    run_together([*few, *more], after=before)
    before = rounds(few)
    for node in more:
        node.die()
    places = run_together(few, after=before)
    assert {place.restarts for place in places.values()} == {0}
    (tmp_path / "finish").touch()
    assert [node.wait() for node in few] == [0, 0]


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_node_and_ends_well_if_it_is_not_needed(
    start: Start, lighthouse: Lighthouse, tmp_path: Path
) -> None:
    nodes = [start(name, nodes="2:2") for name in ("a", "b")]
    run_together(nodes)
    spares = [start(name, nodes="2:2") for name in ("s", "t")]
    with LighthouseClient(lighthouse.address) as client:
        states = lambda: sorted(rank.state for run in client.runs() for rank in run.ranks)  # noqa: E731
        eventually(lambda: states() == ["active", "active", "spare", "spare"])
        before = rounds(nodes)
        nodes[0].die()
        eventually(lambda: "spare" in states() and "lost" in states())
        [active] = [spare for spare in spares if eventually(lambda: any(each.place for each in spares)) and spare.place]
    run_together([nodes[1], active], after=before)
    (tmp_path / "finish").touch()
    ended = {node.name: node.wait() for node in (nodes[1], *spares)}
    assert set(ended.values()) == {0}, ended


@pytest.mark.slow
def test_a_failure_costs_a_restart_of_that_node_and_then_the_run(start: Start, tmp_path: Path) -> None:
    nodes = [start(name, "--max-restarts", "1", nodes="2:2") for name in ("a", "b")]
    run_together(nodes)
    before = rounds(nodes)
    nodes[0].fail()
    places = run_together(nodes, after=before)
    assert places["a"].restarts == 1
    nodes[0].fail()
    assert [node.wait() for node in nodes] == [1, 1]
    assert "boom" in nodes[0].log()


@pytest.mark.slow
def test_the_lighthouse_restarts_and_the_nodes_train_on(tmp_path: Path) -> None:
    journal = ["--journal", str(tmp_path / "journal.sqlite")]
    with ExitStack() as stack:
        with Lighthouse(*journal) as first:
            nodes = [TorchrunNode(name, first.address, tmp_path, "2:3") for name in ("a", "b", "c")]
            for node in nodes:
                stack.callback(node.close)
                node.launch()
            run_together(nodes)
            before = rounds(nodes)
            port = first.port
        stack.enter_context(Lighthouse(*journal, "--bind", f"127.0.0.1:{port}"))
        for node in nodes:
            node.wait_for_log("^lighthouse reachable again")
        assert rounds(nodes) == before
        nodes[0].die()
        run_together(nodes[1:], after=before)


@pytest.mark.slow
def test_a_node_whose_agent_is_stopped_is_lost_and_comes_back(start: Start, tmp_path: Path) -> None:
    nodes = [start(name) for name in ("a", "b", "c")]
    run_together(nodes)
    before = rounds(nodes)
    with nodes[2].paused():
        run_together(nodes[:2], after=before)
        before = rounds(nodes)
    run_together(nodes, after=before)
    (tmp_path / "finish").touch()
    assert [node.wait() for node in nodes] == [0, 0, 0]


@pytest.mark.slow
def test_an_operator_stops_it(start: Start, lighthouse: Lighthouse) -> None:
    nodes = [start(name, "--rdzv-id", "job-7", nodes="2:2") for name in ("a", "b")]
    run_together(nodes)
    with LighthouseClient(lighthouse.address, run="job-7.nodes") as client:
        client.stop_run("enough")
    assert [node.wait() for node in nodes] == [1, 1]
    assert "job-7 is stopped: enough" in nodes[0].log()


@pytest.mark.slow
def test_join_strings_of_a_lighthouse_with_tls(tmp_path: Path) -> None:
    """By the option and by the variable. A wrong pin and a token that was rotated away are each told in one line."""
    folder = tmp_path / "credentials"
    with ExitStack() as stack:
        secured = Secured(stack.enter_context(Lighthouse(*EVERYWHERE, "--credentials", str(folder))), folder)
        rotated = secured.join_string(Role.JOIN)
        for _ in range(2):
            Tokens.read(folder).rotated(Role.JOIN).write(folder)
        good = secured.coordinator(Role.JOIN)
        wrong = replace(good, ca_pin=load_or_make(tmp_path / "other", ()).ca_pin).join_string()
        nodes = [
            TorchrunNode("a", good.join_string(), tmp_path, "2:2"),
            TorchrunNode("b", None, tmp_path, "2:2", LIGHTHOUSE_ADDRESS=good.join_string()),
            TorchrunNode("c", wrong, tmp_path, "1:1", ("--rdzv-id", "c")),
            TorchrunNode("d", None, tmp_path, "1:1", ("--rdzv-id", "d"), LIGHTHOUSE_ADDRESS=rotated),
        ]
        for node in nodes:
            stack.callback(node.close)
            node.launch()
        run_together(nodes[:2])
        (tmp_path / "finish").touch()
        assert [node.wait() for node in nodes] == [0, 0, 1, 1]
        ends = [node.log().strip().splitlines()[-1].partition("RendezvousConnectionError: ")[2] for node in nodes[2:]]
        assert re.match("--rdzv-endpoint: .* has a different CA than the join string", ends[0]), nodes[2].log()
        assert re.match("LIGHTHOUSE_ADDRESS: the token .* was rotated away: run `lighthouse token", ends[1]), ends
        assert not [node.name for node in nodes if good.token in node.log()]


def test_what_is_wrong_is_said(start: Start, lighthouse: Lighthouse) -> None:
    unknown = start("a", "--rdzv-conf", "last_cal_timeout=3")
    taken = start("b", "--rdzv-id", "a b")
    assert [unknown.wait(), taken.wait()] == [1, 1]
    assert "has no option 'last_cal_timeout'; its options are close_timeout" in unknown.log()
    assert "--rdzv-id: 'a b' has ' '" in taken.log()
