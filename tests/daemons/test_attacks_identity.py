"""What a stranger that reaches the daemons tries in the name of a group, as a review has done it: it is refused, and
changes nothing. Real daemons and connections; the stranger has no secret, or that of another group."""

import asyncio
from collections.abc import Iterator

import pytest

from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.run import (
    HelloRejected,
    KeyKind,
    RankHello,
    RankId,
    RankWelcome,
    RunTerms,
    StopAsked,
    SupervisorHello,
    SupervisorWelcome,
)
from lighthouse_protocol.messages.session import (
    GroupReport,
    HeldQuorum,
    Hello,
    HoldState,
    JoinRequest,
    WatchHello,
    WatchOpened,
    Welcome,
)
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, NotPermitted
from lighthouse_runtime.client.clients import AsyncLighthouseClient, ManagerClient
from tests.daemons.secured import CALLS_OF_A_RANK
from tests.processes import PATIENCE_S, Lighthouse, Manager

OURS, THEIRS = "the_secret_of_this_group_0123456789", "the_secret_of_another_group_0123456789"
SECRET, GUESS = "known to the process that came first", "what a stranger shows in its place"
STRANGERS = pytest.mark.parametrize("secret", ["", THEIRS], ids=["no secret", "another group's"])


@pytest.fixture(scope="module")
def manager(lighthouse: Lighthouse) -> Iterator[Manager]:
    with Manager(lighthouse.address, "held", "--job", "held", env={MANAGER_SECRET_VARIABLE: OURS}) as process:
        yield process


class TestManager:
    """A stranger's vote committed, its request redirected peers that heal, and its watch ended a rank's."""

    @STRANGERS
    @pytest.mark.parametrize("call", CALLS_OF_A_RANK)
    def test_a_call_in_a_ranks_name_is_refused(self, manager: Manager, secret: str, call: str) -> None:
        with ManagerClient(manager.address, secret) as stranger, pytest.raises(NotPermitted):
            CALLS_OF_A_RANK[call](stranger)
        assert manager.is_alive

    @STRANGERS
    def test_a_watch_in_a_ranks_name_is_refused_and_ends_none(self, manager: Manager, secret: str) -> None:
        with ManagerClient(manager.address, OURS) as ours, ManagerClient(manager.address, secret) as stranger:
            watch = ours.watch(WatchHello(0, "of the rank"))
            assert isinstance(next(watch), WatchOpened)
            with pytest.raises(NotPermitted):
                next(stranger.watch(WatchHello(0, "of a stranger")))
            ours.quorum(0, 0, "http://rank:1", timeout_s=PATIENCE_S)
            assert ours.should_commit(0, 0, True, timeout_s=PATIENCE_S)
            watch.cancel()


def hello(incarnation: str, secret: str, address: str, replica_id: str = "g") -> Hello:
    participant = Participant(
        replica_id, incarnation, address=f"{address}:1", store_address=f"{address}:2", watched=True
    )
    return Hello(participant, GroupReport(HeldQuorum(1, HoldState.STANDING, 7)), secret)


class TestSessions:
    """A hello with a group's incarnation took its session over, and revoked its quorum."""

    @pytest.mark.parametrize("incarnation", ["i", "another"])
    async def test_a_hello_in_a_groups_name_is_refused_and_changes_nothing(
        self, lighthouse: Lighthouse, incarnation: str
    ) -> None:
        async with (
            AsyncLighthouseClient(lighthouse.address, job=f"taken-{incarnation}") as at,
            asyncio.timeout(PATIENCE_S),
        ):
            async with at.session() as first:
                first.send(hello("i", SECRET, "127.0.0.1"))
                assert isinstance(await anext(first), Welcome)
                with pytest.raises(DuplicateReplica, match="holds a session.*as soon as the lighthouse has detected"):
                    async with at.session() as stranger:
                        stranger.send(hello(incarnation, GUESS, "127.0.0.9"))
                        await anext(stranger)
                [job] = (await at.status(f"taken-{incarnation}")).jobs
                assert [(m.replica_id, m.address) for m in job.members] == [("g", "127.0.0.1:1")]
                async with at.session() as again:  # its manager, over another connection
                    again.send(hello("i", SECRET, "127.0.0.1"))
                    assert isinstance(await anext(again), Welcome)

    async def test_a_session_joins_for_no_other_group(self, lighthouse: Lighthouse) -> None:
        async with AsyncLighthouseClient(lighthouse.address, job="other") as at, asyncio.timeout(PATIENCE_S):
            async with at.session() as first, at.session() as stranger:
                first.send(hello("i", SECRET, "127.0.0.1"))
                assert isinstance(await anext(first), Welcome)
                stranger.send(hello("x", GUESS, "127.0.0.9", "stranger"))
                stranger.send(JoinRequest(1, hello("i", GUESS, "127.0.0.9").participant, 5.0))
                said = [await anext(stranger) for _ in range(2)]
                assert isinstance(said[0], Welcome)
                assert isinstance(said[1].error, InvalidRequest)  # type: ignore[union-attr]
                with pytest.raises(DuplicateReplica):
                    await at.quorum(hello("i", "", "127.0.0.9").participant, timeout_s=5.0)


class TestRuns:
    """A second supervisor, or a later attempt, took the place of the one that was there, and ended its run."""

    async def test_names_slots_and_keys_are_those_of_the_processes_that_are_there(self, lighthouse: Lighthouse) -> None:
        terms = RunTerms(world_size=2)
        async with AsyncLighthouseClient(lighthouse.address, run="taken") as at, asyncio.timeout(PATIENCE_S):
            supervisor, rank, stranger = at.supervise(), at.rank(), at.supervise()
            supervisor.send(SupervisorHello("g", "s", "h", (0, 1), SECRET))
            assert isinstance(await anext(supervisor), SupervisorWelcome)
            rank.send(RankHello(RankId(0, "s.i"), terms, is_ready=True, secret=SECRET))
            assert isinstance(await anext(rank), RankWelcome)
            stranger.send(SupervisorHello("g", "s", "h", (0, 1), GUESS))
            stranger.send(StopAsked("a stranger says so"))
            refused = await anext(stranger)
            assert isinstance(refused, HelloRejected)
            assert isinstance(refused.error, DuplicateReplica)
            for who in (RankId(0, "s.i"), RankId(0, "x")):
                late = at.rank()
                late.send(RankHello(who, terms, attempt=9, is_ready=True, secret=GUESS))
                answer = await anext(late)
                assert isinstance(answer, HelloRejected)
                assert isinstance(answer.error, DuplicateReplica)
            for slot, secret in ((0, GUESS), (0, ""), (1, SECRET)):
                with pytest.raises(NotPermitted, match="only ranks of run taken"):
                    await at.put_key(0, KeyKind.ITERATION, "a", b"", slot=slot, secret=secret)
            [run] = await at.runs("taken")
            assert (run.stop, run.is_complete) == (None, False)
            assert [(s.name, s.is_connected) for s in run.supervisors] == [("g", True)]


def test_where_an_agent_serves_its_state_is_told_to_its_group(manager: Manager) -> None:
    """On the host of the manager, the group's secret opens it; a stranger's proof does not."""
    with ManagerClient(manager.address, OURS) as ours, ManagerClient(manager.address) as stranger:
        watch = ours.watch(WatchHello(0, "of the rank"))
        assert isinstance(next(watch), WatchOpened)
        ours.quorum(0, 1, "http://rank:1", timeout_s=PATIENCE_S, rank_incarnation="of the rank")
        assert ours.checkpoint_address(0, timeout_s=5) == "http://rank:1"
        for secret in ("", GUESS):
            with pytest.raises(NotPermitted, match="members of its quorum"):
                stranger.checkpoint_address(0, quorum_id=1, secret=secret, timeout_s=5)
        watch.cancel()
