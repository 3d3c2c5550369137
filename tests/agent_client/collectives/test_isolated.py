"""A group in a child process: the same sums as gloo's own, and an end that is an end, whatever it waits for."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_client.collectives.group_spec import GroupSpec
from agent_client.collectives.isolated import IsolatedGroup
from agent_client.collectives.peers import connector
from agent_client.errors import ConfigurationError
from agent_client.step.config import MAX_TIMEOUT_S
from tests.agent_client.clusters import command_of, descendants, is_running
from tests.agent_client.collectives.groups import (
    ENDS_WITHIN_S,
    check_abort_ends,
    check_leaves_nothing,
    check_sums,
    meet,
    reconfigure,
    sums,
    wait_in_all_reduce,
)
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank, RankError, RankServer, Start
from tests.agent_client.step.test_agent import check_equal
from tests.agent_client.step.test_agent import meet as meet_in_a_quorum
from tests.processes import Lighthouse, eventually

ISOLATED = "tests.agent_client.isolated_actor:IsolatedActor"
GLOO = "tests.agent_client.actors:GlooActor"


@pytest.fixture(scope="module")
def all_ranks(rank_server: RankServer) -> Iterator[list[Rank]]:
    """Three, for all tests: a fork server takes seconds to start."""
    with ExitStack() as stack:
        yield [stack.enter_context(rank_server.start(ISOLATED)) for _ in range(3)]


@pytest.fixture
def ranks(all_ranks: list[Rank]) -> Iterator[list[Rank]]:
    """Without a group, before and after."""
    yield all_ranks
    for rank in all_ranks:
        rank.resume()
        rank.call("drop")


def test_a_timeout_may_be_longer_than_poll_can_wait() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen(["sleep", "60"]) as child, theirs:
        theirs.send(b"{}")
        spec = GroupSpec("", "", 0, 1, "", connect_timeout_s=MAX_TIMEOUT_S, timeout_s=MAX_TIMEOUT_S)
        IsolatedGroup(ours, os.pidfd_open(child.pid), {}, spec).abort()


def family_of(rank: Rank) -> list[int]:
    """Its fork server, and that one's only child: an earlier group's is killed, and then gone in its own time."""
    eventually(lambda: len(descendants(rank.pid)) == 2, f"rank {rank.pid} has a fork server with one child")
    return descendants(rank.pid)


def child_of(rank: Rank) -> int:
    _, child = family_of(rank)
    return child


def test_sums_are_bit_for_bit_gloo_s(store: str, ranks: list[Rank], start: Start) -> None:
    others = start(3, GLOO)
    meet(store, ranks)
    meet(store, others)
    for length in (1, 3, 1000, 600_000, 10):  # the shared memory grows once
        check_sums(ranks, length)
        assert sums(ranks, length) == sums(others, length)


def test_tensors_of_any_kind_are_summed(store: str, ranks: list[Rank]) -> None:
    meet(store, ranks)
    pending = [rank.begin("all_reduce_odd_tensors", at) for at, rank in enumerate(ranks)]
    sums, *others = [each.result() for each in pending]
    assert others == [sums, sums]
    assert len(set(sums)) == len(sums)


def test_an_abort_ends_the_wait_for_a_stopped_peer_and_a_new_group_works(store: str, ranks: list[Rank]) -> None:
    *survivors, stopped = ranks
    meet(store, ranks)
    os.kill(child_of(stopped), signal.SIGSTOP)
    stopped.stop()
    check_abort_ends(survivors, wait_in_all_reduce(survivors))
    meet(store, survivors)
    check_sums(survivors)


def test_an_abort_ends_a_child_that_does_nothing_any_more(store: str, ranks: list[Rank]) -> None:
    meet(store, ranks)
    child = child_of(ranks[0])
    os.kill(child, signal.SIGSTOP)
    check_abort_ends(ranks[:1], wait_in_all_reduce(ranks[:1]))
    eventually(lambda: not is_running(child), "the child is gone")


def test_a_child_that_dies_ends_the_wait(store: str, ranks: list[Rank]) -> None:
    meet(store, ranks)
    [waiting] = wait_in_all_reduce(ranks[:1])
    os.kill(child_of(ranks[0]), signal.SIGKILL)
    error, _ = waiting.result(ENDS_WITHIN_S)
    assert "the child of the process group has ended" in error
    with pytest.raises(RankError, match="the child of the process group died"):
        ranks[0].call("all_reduce", 0, 3)


def test_a_fork_server_that_dies_takes_its_child_along_and_is_started_again(store: str, ranks: list[Rank]) -> None:
    meet(store, ranks)
    [waiting] = wait_in_all_reduce(ranks[:1])
    fork_server, _ = family_of(ranks[0])
    os.kill(fork_server, signal.SIGKILL)
    error, _ = waiting.result(ENDS_WITHIN_S)
    assert "the child of the process group has ended" in error
    with pytest.raises(RankError, match="the fork server has ended"):
        ranks[0].call("meet", store, "alone", 0, 1)
    for rank in ranks:
        rank.call("drop")
    meet(store, ranks)
    check_sums(ranks)


def test_a_child_that_does_not_answer_in_time_is_killed(store: str, ranks: list[Rank]) -> None:
    meet(store, ranks, timeout_s=0.2)
    ranks[0].call("allow_slack", 0.2)
    child = child_of(ranks[0])
    os.kill(child, signal.SIGSTOP)
    error, _ = ranks[0].call("wait_in_all_reduce")
    assert "did not answer within 0.4 s; it was killed" in error
    eventually(lambda: not is_running(child), "the child is gone")


def test_a_peer_that_does_not_come_fails_the_meeting_and_its_child_ends(store: str, ranks: list[Rank]) -> None:
    rank, *_ = ranks
    with pytest.raises(RankError) as refused:
        rank.call("meet", store, "alone", 0, 2, connect_timeout_s=0.5)
    assert refused.value.kind == "RuntimeError"
    eventually(lambda: len(descendants(rank.pid)) == 1, "only the fork server is left")


@pytest.mark.parametrize("how", ["killed", "closed", "killed, and a forked process lives on"])
def test_nothing_outlives_the_rank(store: str, start: Start, how: str) -> None:
    [rank, _] = both = [*start(1, ISOLATED), *start(1, GLOO)]
    meet(store, both)
    wait_in_all_reduce([rank])
    below = descendants(rank.pid)
    assert "fork_server" in command_of(below[0])
    forked = rank.call("fork") if "forked" in how else None
    rank.call("close") if how == "closed" else rank.signal(signal.SIGKILL)
    eventually(lambda: not any(map(is_running, below)), f"{below} have ended", 10.0)
    if forked is not None:
        os.kill(forked, signal.SIGKILL)


def test_reconfigurations_leak_no_descriptor_and_no_process(store: str, ranks: list[Rank]) -> None:
    pair = ranks[:2]
    check_leaves_nothing(pair, lambda count: reconfigure(store, pair, count), times=10)
    for rank in pair:
        eventually(lambda rank=rank: len(descendants(rank.pid)) == 1, "only the fork server is left")


def test_agents_train_over_it_to_the_bits_of_gloo_and_survive_a_kill(
    lighthouse: Lighthouse, store: str, rank_server: RankServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        found: dict[str, list[str]] = {}
        for kind in ("gloo", "isolated"):
            job = Job(lighthouse.address, store, rank_server, tmp_path, stack)
            a, b = job.groups("a", "b", process_group=kind, connect_timeout_s=60.0)
            of_a, of_b = meet_in_a_quorum(job, {"a": a, "b": b}, 3)
            assert check_equal(of_a, of_b) == 3
            found[kind] = [step["hash"] for step in of_a]
        assert found["isolated"] == found["gloo"]
        survivors = a.begin("steps", 6)
        b.call("ask")
        b.kill()
        assert [step["committed"] for step in survivors.result()] == [False, True, True, True]
        took_s = a.call("last_reconfiguration_s")
        assert 0 < took_s < 60
        log = job.log("a")
        assert "process group (isolated) of 2 made in" in log
        assert f"process group (isolated) of 1 made in {took_s:.3f} s" in log
        assert log.count("process group (isolated)") == 2, "once for each quorum"


def test_a_process_group_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'glue' is not one of gloo, nccl, isolated, isolated:nccl"):
        connector("glue")
