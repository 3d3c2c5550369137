"""The typed clients: errors become refusals, and times are kept."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import grpc
import pytest

from examples.ports import free_port
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import LIGHTHOUSE_PORT, MAX_REQUEST_BYTES
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    InvalidRequest,
    LighthouseError,
    LimitReached,
    UnknownName,
    Unreachable,
)
from lighthouse_runtime.client.clients import AsyncLighthouseClient, AsyncManagerClient, LighthouseClient, ManagerClient
from tests.processes import LOCALHOST, Lighthouse, Manager

NOWHERE = f"{LOCALHOST}:1"


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse("--heartbeat-timeout", "10s") as process:
        yield process


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("http://coordinator", f"coordinator:{LIGHTHOUSE_PORT}"),
        ("coordinator:80", "coordinator:80"),
        ("::1", f"[::1]:{LIGHTHOUSE_PORT}"),
    ],
)
def test_a_lighthouse_without_a_port_is_at_its_default_one(address: str, meant: str) -> None:
    with LighthouseClient(address) as client:
        assert client.address == meant


def test_what_is_no_address_is_refused_and_a_manager_has_no_default_port() -> None:
    with pytest.raises(InvalidRequest, match=r"^lighthouse: "):
        LighthouseClient("a b")
    for address, why in (("host", "has no port"), ("host:0", "port 0 is not a port to connect to")):
        with pytest.raises(InvalidRequest, match=f"^address: .* {why}; write host:port"):
            ManagerClient(address)


# -- what both kinds of client do, asked of both

Ask = Callable[..., Any]


@contextlib.contextmanager
def _sync(kind: type[Any], address: str, **options: Any) -> Iterator[Ask]:
    with kind(address, **options) as client:
        yield lambda method, *arguments, **more: getattr(client, method)(*arguments, **more)


@contextlib.contextmanager
def _async(kind: type[Any], address: str, **options: Any) -> Iterator[Ask]:
    with asyncio.Runner() as runner:

        async def make() -> Any:
            return await kind(address, **options).__aenter__()

        client = runner.run(make())

        async def run(method: str, *arguments: Any, **more: Any) -> Any:
            return await getattr(client, method)(*arguments, **more)

        yield lambda *arguments, **more: runner.run(run(*arguments, **more))
        runner.run(client.close())


LIGHTHOUSES = [(_sync, LighthouseClient), (_async, AsyncLighthouseClient)]
MANAGERS = [(_sync, ManagerClient), (_async, AsyncManagerClient)]


@pytest.mark.parametrize(("connect", "kind"), LIGHTHOUSES)
def test_every_rpc_of_a_lighthouse(lighthouse: Lighthouse, connect: Any, kind: type[Any]) -> None:
    job = kind.__name__
    with connect(kind, lighthouse.address, job=job) as ask:
        me = Participant("a", "7", address="10.0.0.1:1", store_address="10.0.0.1:2", step=3, data="{}", tag_quorum_id=2)
        quorum: Quorum = ask("quorum", me, timeout_s=30)
        assert quorum.participants == (me,)
        ask("heartbeat", "a", "7", timeout_s=30)
        (shown,) = ask("status", job, timeout_s=30).jobs
        assert (shown.job, shown.quorum_id, shown.members[0].step) == (job, quorum.quorum_id, 3)
        with pytest.raises(UnknownName, match="no live replica group 'z'"):
            ask("kill", "z", timeout_s=30)
        with pytest.raises(InvalidRequest, match=r"^replica_id: 'a b' has ' '"):
            ask("quorum", Participant("a b"), timeout_s=30)
        with pytest.raises(InvalidRequest, match=r"^replica_id: is empty"):
            ask("heartbeat", "", timeout_s=30)


@pytest.mark.parametrize(("connect", "kind"), MANAGERS)
def test_every_rpc_of_a_manager(lighthouse: Lighthouse, connect: Any, kind: type[Any]) -> None:
    with Manager(lighthouse.address, "a", "--job", kind.__name__) as process:
        with connect(kind, process.address) as ask:
            answer = ask("quorum", 0, 3, "here", timeout_s=30, tag_quorum_id=1)
            assert (answer.replica_ids, answer.max_step, answer.heals) == (("a",), 3, False)
            assert ask("checkpoint_address", 0, 3) == "here"
            assert ask("should_commit", 0, 3, True, timeout_s=30, quorum_id=answer.quorum_id) is True
            ask("quorum", 0, 4, timeout_s=30)
            assert ask("vote", 0, 4, True, timeout_s=30).commit is True
            assert ask("status").commits == 2
            ask("kill", "enough")
        assert process.wait() == 1


@pytest.mark.parametrize(("connect", "kind"), [*LIGHTHOUSES, *MANAGERS])
def test_nobody_there_is_unreachable(connect: Any, kind: type[Any]) -> None:
    with connect(kind, NOWHERE) as ask:
        began_at = time.monotonic()
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 is unreachable"):
            ask("status", timeout_s=30)
        assert time.monotonic() - began_at < 15


def test_of_two_lighthouses_that_are_away_each_has_one_connection() -> None:
    """However often they are tried in turn: each connection takes memory and, with an idle follower, a descriptor."""
    with (
        mock.patch.object(grpc, "insecure_channel", side_effect=grpc.insecure_channel) as opened,
        LighthouseClient(f"{NOWHERE},{LOCALHOST}:2") as client,
    ):
        tried: list[str] = []
        for _ in range(3):
            for ask in (lambda: client.status(timeout_s=0.1), lambda: next(client.rank())):
                tried.append(client.address)
                with pytest.raises(Unreachable):
                    ask()
        assert set(tried) == {NOWHERE, f"{LOCALHOST}:2"}
        assert opened.call_count == 2


def test_a_call_goes_out_though_another_thread_moves_to_the_next_lighthouse_meanwhile() -> None:
    with LighthouseClient(f"{NOWHERE},{LOCALHOST}:2") as client:
        lock, moves = threading.Lock(), [Address(LOCALHOST, 2)]

        class ThenMoves:
            """As if the other thread waited for the lock."""

            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()
                if moves:
                    client._move(moves.pop())

        client._lock = ThenMoves()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(Unreachable):
            client.status(timeout_s=0.1)
        assert not moves


@pytest.mark.parametrize(("connect", "kind"), LIGHTHOUSES)
def test_a_quorum_waits_for_a_lighthouse_that_is_away_and_then_names_it(connect: Any, kind: type[Any]) -> None:
    with connect(kind, NOWHERE) as ask:
        began_at = time.monotonic()
        with pytest.raises((Unreachable, DeadlinePassed), match=r"127\.0\.0\.1:1"):
            ask("quorum", Participant("a"), timeout_s=1.0)
        assert time.monotonic() - began_at > 0.9


@pytest.mark.parametrize(("connect", "kind"), LIGHTHOUSES)
def test_a_quorum_is_answered_by_a_lighthouse_that_comes_late(connect: Any, kind: type[Any]) -> None:
    port = free_port()
    late = Lighthouse("--bind", f"{LOCALHOST}:{port}")
    with contextlib.ExitStack() as stack, connect(kind, f"{LOCALHOST}:{port}") as ask:
        stack.callback(late.close)
        late.launch()
        assert len(ask("quorum", Participant("a"), timeout_s=60).participants) == 1


@pytest.mark.parametrize(("connect", "kind"), [*LIGHTHOUSES, *MANAGERS])
def test_a_time_that_is_over_is_deadline_passed(lighthouse: Lighthouse, connect: Any, kind: type[Any]) -> None:
    with lighthouse.paused(), connect(kind, lighthouse.address) as ask:
        began_at = time.monotonic()
        with pytest.raises((DeadlinePassed, Unreachable)):
            ask("status", timeout_s=0.5)
        assert time.monotonic() - began_at < 15


def test_a_deadline_passed_is_a_timeout_error(lighthouse: Lighthouse) -> None:
    with LighthouseClient(lighthouse.address, job="slow") as client:
        client.heartbeat("b")
        with pytest.raises(TimeoutError, match=r"no quorum within .* s: waiting_for_stragglers: waiting for b"):
            client.quorum(Participant("a"), timeout_s=3.0)


def test_a_request_that_is_too_big_is_a_limit(lighthouse: Lighthouse) -> None:
    with LighthouseClient(lighthouse.address) as client, pytest.raises(LimitReached, match="larger than max"):
        client.kill("x" * MAX_REQUEST_BYTES)


async def test_connect_waits_and_then_says_who_does_not_answer(lighthouse: Lighthouse) -> None:
    async with AsyncManagerClient(lighthouse.address) as client:
        await client.connect(30)
    async with AsyncManagerClient(NOWHERE) as client:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 does not answer within 0\.3 s"):
            await client.connect(0.3)


async def test_a_cancelled_call_is_cancelled(lighthouse: Lighthouse) -> None:
    async with AsyncLighthouseClient(lighthouse.address, job="cancelled") as client:
        await client.heartbeat("b")
        with pytest.raises(TimeoutError) as e:
            async with asyncio.timeout(0.3):
                await client.quorum(Participant("a"), timeout_s=30)
        assert not isinstance(e.value, LighthouseError)
