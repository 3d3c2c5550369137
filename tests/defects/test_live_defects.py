"""Defects of torchft, by number, asked of our daemons as real processes."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    Drained,
    LighthouseError,
    Unreachable,
    WrongState,
)
from lighthouse_runtime.client.clients import LighthouseClient, ManagerClient
from tests.processes import Lighthouse, Manager, Process, eventually, together

pytestmark = pytest.mark.slow

# A call whose answer is expected long before: what ends near it has hung.
LONG_S = 60.0
AT_ONCE_S = LONG_S / 3


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(16)
    yield executor
    executor.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def lighthouse_of(*options: str) -> Iterator[tuple[Lighthouse, LighthouseClient]]:
    with Lighthouse(*options) as process, LighthouseClient(process.address) as client:
        yield process, client


def states(client: LighthouseClient) -> dict[str, str]:
    return {member.replica_id: member.state.value for job in client.status().jobs for member in job.members}


def wait_for_state(client: LighthouseClient, name: str, state: str) -> None:
    eventually(lambda: states(client).get(name) == state, f"{name} is {state}")


def wait_for_ranks(manager: ManagerClient, *ranks: int) -> None:
    eventually(lambda: manager.status().ranks_waiting == ranks, f"ranks {ranks} wait")


def names(quorum: Quorum) -> list[str]:
    return [participant.replica_id for participant in quorum.participants]


def join(pool: ThreadPoolExecutor, client: LighthouseClient, name: str, step: int = 0, **more: Any) -> "Future[Quorum]":
    timeout_s = more.pop("timeout_s", LONG_S)
    return pool.submit(client.quorum, Participant(name, step=step, **more), timeout_s=timeout_s)


def refusal(answer: "Future[Any]") -> BaseException | None:
    return answer.exception(LONG_S + 30)


def seconds(function: Callable[[], Any]) -> float:
    began_at = time.monotonic()
    function()
    return time.monotonic() - began_at


# -- 1, 2: votes and answers belong to their call and their round


def test_defect_1_a_killed_voter_has_not_voted() -> None:
    code = "import sys; from lighthouse_runtime.client.clients import ManagerClient as C\n"
    code += f"C(sys.argv[1]).should_commit(0, 21, True, timeout_s={LONG_S})"
    with Manager("127.0.0.1:1", ranks=2) as process, ManagerClient(process.address) as manager:
        with Process(code, [process.address]) as voter:
            eventually(lambda: manager.status().phase == "voting", "rank 0 has voted")
            voter.kill()
        eventually(lambda: manager.status().phase == "idle", "its vote is gone")
        with pytest.raises(DeadlinePassed):
            manager.should_commit(1, 21, True, timeout_s=0.5)


# -- 3: who has gone is not handed out

CALLER = f"""
import sys
from lighthouse_runtime.client.clients import LighthouseClient
from lighthouse_protocol.messages.membership import Participant
LighthouseClient(sys.argv[1]).quorum(Participant(sys.argv[2]), timeout_s={LONG_S})
"""


def test_defect_3_a_killed_caller_is_not_a_participant(pool: ThreadPoolExecutor) -> None:
    with lighthouse_of("--min-replicas", "2", "--heartbeat-timeout", "1s") as (lighthouse, client):
        with Process(CALLER, [lighthouse.address, "a"]) as caller:
            wait_for_state(client, "a", "joined")
            caller.kill()
        eventually(lambda: states(client)["a"] != "joined", "its join is gone")
        answer = join(pool, client, "b")
        wait_for_state(client, "b", "joined")
        assert not answer.done()
        third = client.quorum(Participant("c"), timeout_s=LONG_S)
        assert names(third) == names(answer.result(LONG_S)) == ["b", "c"]


def test_defect_3_a_group_whose_rank_is_killed_takes_its_join_back(pool: ThreadPoolExecutor) -> None:
    with lighthouse_of("--min-replicas", "2") as (lighthouse, client), Manager(lighthouse.address, ranks=2) as process:
        code = "import sys; from lighthouse_runtime.client.clients import ManagerClient as C\n"
        code += f"C(sys.argv[1]).quorum(0, 0, timeout_s={LONG_S})"
        with Process(code, [process.address]) as rank, ManagerClient(process.address) as manager:
            other = pool.submit(manager.quorum, 1, 0, timeout_s=LONG_S)
            wait_for_state(client, "a", "joined")
            rank.kill()
            eventually(lambda: states(client)["a"] != "joined", "the group's join is gone")
            assert manager.status().ranks_waiting == (1,)
            assert not other.done()


# -- 9: one straggler


def test_defect_9_a_manager_answers_its_ranks_in_time_too(pool: ThreadPoolExecutor) -> None:
    timeout_s = 4.0
    with lighthouse_of("--min-replicas", "2", "--join-timeout", f"{timeout_s}s") as (lighthouse, client):
        groups = [Manager(lighthouse.address, name) for name in ("a", "b", "c")]
        with together(*groups), contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(ManagerClient(group.address)) for group in groups]
            eventually(lambda: states(client).keys() == {"a", "b", "c"}, "all three are alive")
            answers = [pool.submit(rank.quorum, 0, 0, timeout_s=LONG_S) for rank in ranks]
            assert [answer.result(LONG_S).replica_world_size for answer in answers] == [3] * 3
            answers = [pool.submit(rank.quorum, 0, 1, timeout_s=timeout_s) for rank in ranks[:2]]
            assert [answer.result(LONG_S).replica_ids for answer in answers] == [("a", "b")] * 2
            assert states(client)["c"] in ("timed_out", "idle", "participant")


# -- 10: what the lighthouse says reaches every waiting rank


def test_defect_10_a_refusal_reaches_every_waiting_rank_at_once(pool: ThreadPoolExecutor) -> None:
    with lighthouse_of("--min-replicas", "2") as (lighthouse, client):
        join(pool, client, "b", group_world_size=7, timeout_s=5.0)
        wait_for_state(client, "b", "joined")
        with Manager(lighthouse.address, ranks=3) as process, ManagerClient(process.address) as manager:
            answers = [pool.submit(manager.quorum, rank, 0, timeout_s=LONG_S) for rank in range(3)]
            took_s = seconds(lambda: [refusal(answer) for answer in answers])
            for error in map(refusal, answers):
                assert isinstance(error, WrongState)
                assert "world_size: a has 3 ranks, b has 7" in str(error)
            assert took_s < AT_ONCE_S


@pytest.mark.parametrize("how", ["never there", "killed", "stopped", "paused"])
def test_defect_10_a_lighthouse_that_is_away_is_told_before_the_deadline(pool: ThreadPoolExecutor, how: str) -> None:
    with lighthouse_of("--min-replicas", "2") as (lighthouse, client), contextlib.ExitStack() as stack:
        address = "127.0.0.1:1" if how == "never there" else lighthouse.address
        process = stack.enter_context(Manager(address, ranks=3))
        manager = stack.enter_context(ManagerClient(process.address))
        answers = [pool.submit(manager.quorum, rank, 0, timeout_s=3.0) for rank in range(3)]
        if how == "never there":
            wait_for_ranks(manager, 0, 1, 2)
        else:
            wait_for_state(client, "a", "joined")
        {"never there": lambda: None, "killed": lighthouse.kill, "stopped": lighthouse.stop}.get(
            how, lambda: stack.enter_context(lighthouse.paused())
        )()
        for error in map(refusal, answers):
            # "gave no answer" without a reason is what a caller's own deadline says: then nobody told it anything
            assert isinstance(error, Unreachable | DeadlinePassed)
            assert "lighthouse" in str(error), error
            assert "did not answer within 3 s" not in str(error)
        assert manager.status().ranks_waiting == ()


# -- 15: a stop ends what is open


def test_defect_15_sigterm_tells_every_waiting_rank_why(pool: ThreadPoolExecutor) -> None:
    with Manager("127.0.0.1:1", ranks=3) as process, ManagerClient(process.address) as manager:
        vote = pool.submit(manager.should_commit, 2, 0, True, timeout_s=LONG_S)
        eventually(lambda: manager.status().phase == "voting", "rank 2 has voted")
        answers = [pool.submit(manager.quorum, rank, 0, timeout_s=LONG_S) for rank in range(2)]
        wait_for_ranks(manager, 0, 1)
        assert process.stop() == 0
        for error in map(refusal, answers):
            assert isinstance(error, Drained)
            assert "a leaves: its manager was asked to stop" in str(error)
        error = refusal(vote)
        assert isinstance(error, Unreachable)
        assert "the manager of a is shutting down" in str(error)


def test_defect_15_sigterm_tells_every_waiting_group_why(pool: ThreadPoolExecutor) -> None:
    with lighthouse_of("--min-replicas", "9") as (lighthouse, client):
        answers = [join(pool, client, name) for name in ("a", "b")]
        for name in ("a", "b"):
            wait_for_state(client, name, "joined")
        assert lighthouse.stop() == 0
        for error in map(refusal, answers):
            assert isinstance(error, Unreachable)
            assert "the lighthouse is shutting down" in str(error)


def test_defect_15_a_call_that_meets_the_stop_is_told_that_nobody_serves(pool: ThreadPoolExecutor) -> None:
    """Not that its time is over: a manager must go on to the lighthouse's successor."""
    stopped = threading.Event()

    def call_until_refused(address: str) -> LighthouseError | None:
        with LighthouseClient(address) as client:
            while not stopped.is_set():
                try:
                    client.status(timeout_s=LONG_S)
                except LighthouseError as e:
                    return e
        return None

    with Lighthouse() as process:
        answers = [pool.submit(call_until_refused, process.address) for _ in range(16)]
        time.sleep(0.3)
        process.stop()
        stopped.set()
        errors = [error for answer in answers if (error := answer.result(LONG_S))]
    assert errors
    assert [error for error in errors if not isinstance(error, Unreachable)] == []


@pytest.mark.parametrize("which", ["lighthouse", "manager"])
def test_defect_15_an_open_connection_is_not_served_after_the_stop(which: str) -> None:
    """A stream that never ends holds the drain; the calls beside it, on the same connection, are refused."""
    with contextlib.ExitStack() as stack:
        process: Lighthouse | Manager = stack.enter_context(
            Lighthouse("--shutdown-timeout", "8s")
            if which == "lighthouse"
            else Manager("127.0.0.1:1", "a", "--shutdown-timeout", "8s")
        )
        channel = stack.enter_context(grpc.insecure_channel(process.address))
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        process.signal(15)
        process.wait_for_log("draining|stopping")

        def is_refused() -> bool:
            try:
                health.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            except grpc.RpcError as e:
                return e.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            return False

        eventually(is_refused, "calls are refused", within_s=7.0)
        assert process.is_alive
        if which == "lighthouse":
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as e:
            list(watch)
        assert e.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert process.wait() == 0
