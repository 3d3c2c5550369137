"""Every attack of a review, as a test: refused, bounded or harmless, with the reason in the log or the audit.

Real daemons that other hosts reach, with TLS and tokens; three attackers. What is shown elsewhere stands in ELSEWHERE,
by the number that the review has given it; a test looks whether it is there.

C2 (a thief that reads the model, a poisoner that replaces it): see ELSEWHERE.
"""

import ast
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE, MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.hosts import HostEndAsked, HostHello
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.progress import GroupView, OpenPhase, ProgressSample, RankName, RankView
from lighthouse_protocol.messages.run import (
    FinishReport,
    HostExcluded,
    KeyKind,
    ProcessLost,
    RankHello,
    RankId,
    RunTerms,
    StopAsked,
    SupervisorHello,
)
from lighthouse_protocol.messages.session import (
    GroupReport,
    Heartbeat,
    HeldQuorum,
    Hello,
    HoldState,
    JoinAccepted,
    JoinRequest,
    WatchHello,
    WatchOpened,
)
from lighthouse_protocol.rank_set import RankSet
from lighthouse_protocol.refusals import LighthouseError, LimitReached, NotPermitted
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client.clients import AsyncLighthouseClient, AsyncManagerClient, LighthouseClient, ManagerClient
from tests.daemons.secured import CALLS_OF_A_RANK, EVERYWHERE, Secured
from tests.processes import LIGHTHOUSE_CODE, PATIENCE_S, ROOT, Lighthouse, Manager, run_cli

OURS, THEIRS = "the_secret_of_this_group_0123456789", "the_secret_of_another_group_0123456789"
SECRET, GUESS = "known to the process that came first", "what a stranger shows in its place"
NEVER_GIVEN, ABSURD = (2**52, 2**62), 1.7e308
TERMS = RunTerms(world_size=2)
OUTPUT = "the answer is swordfish"

TESTS = "tests/"
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "C2": (
        "agent_client/healing/test_proofs.py::test_a_stranger_gets_none",
        "agent_client/healing/test_proofs.py::test_nor_does_one_give_any",
        "lighthouse/job/test_lineage.py::test_a_running_history_wins_against_a_dumb_version",
        "lighthouse/job/test_lineage.py::TestAheadOfTheMembers",
        "lighthouse/job/test_returning.py::TestLostJournal",
    ),
    "C3": (
        "daemons/test_secure.py::test_each_role_against_each_rpc",
        "lighthouse/job/test_strangers.py::TestStrangersUnderANameOfTheirOwn",
    ),
    "C4": ("lighthouse/job/test_presence.py::TestDuplicates",),
    "H1": ("daemons/test_secure.py::test_a_browser_signs_in_and_its_cookie_is_good_for_what_its_token_is",),
    "H2": (
        "daemons/test_limits.py::"
        "test_sets_of_ranks_of_the_largest_size_are_counted_and_put_in_words_without_a_list_of_them",
    ),
    "H3": ("daemons/test_limits.py::test_a_stream_that_says_too_much_is_ended",),
    "H4": ("daemons/test_limits.py::test_new_names_are_counted_and_known_ones_come_back_as_they_like",),
    "H5": ("daemons/test_supervisor.py::TestEnds::test_a_save_at_the_end_has_its_grace",),
    "H6": ("daemons/test_secure.py::test_loopback_grants_nothing_and_the_users_own_files_do",),
    "M3": ("lighthouse_runtime/web/test_connections.py::test_a_header_that_drips_is_too_late_as_well",),
    "M4": (
        "lighthouse_runtime/web/test_status_feed.py::test_where_as_many_listen_as_may_one_more_takes_the_place_of_the_oldest",
    ),
    "M5": (
        "agent_client/healing/test_proofs.py::test_connections_are_bounded",
        "lighthouse_runtime/net/test_address.py::test_what_is_reached_by_a_loopback_listens_on_that_alone",
    ),
    "M6": (
        "daemons/test_supervisor.py::TestAGuardThatIsStopped",
        "manager/guard/test_client.py::test_one_that_is_stopped_again_and_again_is_killed",
    ),
    "M7": ("manager/guard/test_output.py::test_what_another_has_put_there_is_refused_at_once",),
    "M8": ("daemons/test_supervisor.py::TestStrays",),
    "Low": (
        "manager/supervisor/test_worker_hosts.py::test_only_a_stop_signal_ends_the_group",
        "lighthouse_runtime/web/test_control.py::test_a_body_that_is_deep_or_without_end",
        "lighthouse_runtime/server/test_grpc_server.py::test_a_caller_that_has_gone_while_it_is_refused_is_no_defect",
        "lighthouse_runtime/server/test_grpc_server.py::test_what_cannot_be_listened_on_is_refused_with_the_option",
        "daemons/test_limits.py::test_keys_written_are_counted_for_the_peer_not_only_for_the_run",
    ),
}


@dataclass(frozen=True)
class Attacker:
    """`role`: of its token of the lighthouse; None: it has none. `secret`: of a group that is not the one attacked."""

    role: Role | None
    secret: str

    @property
    def is_member(self) -> bool:
        """It may train here, as a group of its own."""
        return self.role is Role.JOIN


ATTACKERS = pytest.mark.parametrize(
    "attacker",
    [Attacker(None, ""), Attacker(Role.JOIN, THEIRS), Attacker(Role.VIEW, "")],
    ids=["no credential", "another group's", "view token"],
)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("state") / "credentials"
    with Lighthouse(*EVERYWHERE, "--credentials", str(folder)) as lighthouse:
        yield Secured(lighthouse, folder)


@pytest.fixture(scope="module")
def manager(secured: Secured) -> Iterator[Manager]:
    """Of an honest group."""
    join = secured.join_string(Role.JOIN)
    env = {MANAGER_SECRET_VARIABLE: OURS, "LIGHTHOUSE_ADDRESS": join}
    with Manager(None, "held", "--job", "held", env=env) as process:
        yield process


@asynccontextmanager
async def at(
    secured: Secured, who: Attacker | Role, job: str = "default", run: str = "default"
) -> AsyncIterator[AsyncLighthouseClient]:
    coordinator: Coordinator = secured.coordinator(who.role if isinstance(who, Attacker) else who)
    async with AsyncLighthouseClient(coordinator, job=job, run=run) as client, asyncio.timeout(PATIENCE_S):
        yield client


async def refusal(work: Awaitable[Any]) -> LighthouseError:
    """What it is refused with."""
    with pytest.raises(LighthouseError) as refused:
        await work
    return refused.value


async def told(stream: Any, *messages: Any, answers: int = 1, is_all: bool = False) -> list[Any]:
    """What the stream answers; a refusal that ends it is the last. `is_all`: it is ended, and all was read."""
    for message in messages:
        stream.send(message)
    if is_all:
        stream.end()
        answers = 1000
    found: list[Any] = []
    try:
        while len(found) < answers:
            found.append(await anext(stream))
    except LighthouseError as e:
        found.append(e)
    except StopAsyncIteration:
        pass
    return found


async def until(look: Callable[[], Awaitable[Any]]) -> Any:
    """What `look` finds, once it finds something."""
    while not (found := await look()):  # noqa: ASYNC110  nothing tells
        await asyncio.sleep(0.01)
    return found


def why(answer: Any) -> LighthouseError | None:
    """The refusal that an answer is, or has; None: it is none."""
    return answer if isinstance(answer, LighthouseError) else getattr(answer, "error", None)


def group(name: str, incarnation: str = "i", **more: Any) -> Participant:
    return Participant(name, incarnation, address="127.0.0.1:1", store_address="127.0.0.1:2", watched=True, **more)


def hello(name: str, secret: str, incarnation: str = "i", *, size: int = 1, **levels: Any) -> Hello:
    return Hello(group(name, incarnation, group_world_size=size), GroupReport(**levels), secret)


async def honest_quorum(secured: Secured, job: str) -> int:
    """A group comes, and gets one: its id."""
    async with at(secured, Role.JOIN, job) as client, client.session() as session:
        session.send(hello("honest", SECRET))
        session.send(JoinRequest(1, group("honest"), 60.0))
        async for message in session:
            if isinstance(message, JoinAccepted):
                return message.quorum.quorum_id
    raise AssertionError("the session has ended")


def is_denied(answer: Any, attacker: Attacker) -> bool:
    """Without the role, before anything is read."""
    said = why(answer)
    denied = isinstance(said, NotPermitted) and "needs a credential of role" in str(said)
    return denied and not attacker.is_member


@ATTACKERS
class TestIds:
    """C1. An id that nobody has given out disabled a job for good, over restarts."""

    @pytest.mark.parametrize("huge", NEVER_GIVEN)
    async def test_c1_of_a_quorum(self, secured: Secured, attacker: Attacker, huge: int) -> None:
        job = f"c1-{attacker.role}-{huge}"
        async with at(secured, attacker, job) as client, client.session() as session:
            held = HeldQuorum(huge, HoldState.STANDING, 7)
            [answer] = await told(session, hello("attacker", THEIRS, held=held))
            if attacker.is_member:
                assert re.search("never given out|quorum ids are 0 to", str(why(answer)))
            else:
                assert is_denied(answer, attacker)
        assert await honest_quorum(secured, job) < 2**50

    @pytest.mark.parametrize("huge", NEVER_GIVEN)
    async def test_c1_of_a_generation(self, secured: Secured, attacker: Attacker, huge: int) -> None:
        run = f"c1-{attacker.role}-{huge}"
        async with at(secured, attacker, run=run) as client, client.rank() as rank:
            [answer] = await told(rank, RankHello(RankId(0, "x"), RunTerms(1), is_ready=True, seen=huge, secret=THEIRS))
            assert why(answer) is not None
        if attacker.is_member:
            async with at(secured, Role.VIEW, run=run) as client:
                assert all(status.counters.number < 2**50 for status in await client.runs(run))


CONTROL: dict[str, Callable[[AsyncLighthouseClient], Awaitable[Any]]] = {
    "Kill": lambda client: client.kill("a"),
    "Drain": lambda client: client.drain("a"),
    "StopRun": lambda client: client.stop_run("a stranger says so"),
    "ResumeRun": lambda client: client.resume_run(),
    "Stacks": lambda client: client.stacks(),
    "Incident": lambda client: client.incident("x"),
}


@ATTACKERS
class TestControl:
    """C3. Streams without a policy did what the calls with one refused."""

    @pytest.mark.parametrize("act", CONTROL)
    async def test_c3_a_call_is_refused_and_noted(self, secured: Secured, attacker: Attacker, act: str) -> None:
        async with at(secured, attacker) as client:
            assert f"{act} needs a credential of role operate" in str(await refusal(CONTROL[act](client)))
        [*_, noted] = [entry for entry in secured.audit if entry["what"] == act]
        assert noted["result"].startswith("refused: ")
        assert noted["role"] == (attacker.role or "none")
        assert f"audit: {act} by " in secured.lighthouse.log()

    async def test_c3_a_run_is_its_own(self, secured: Secured, attacker: Attacker) -> None:
        """By a stop, by an exclusion, under the supervisor's name, by a later attempt of a rank that then finishes, and
        by a key."""
        run = f"c3-{attacker.role}"
        async with at(secured, Role.JOIN, run=run) as ours, at(secured, attacker, run=run) as theirs:
            supervisor, ranks = ours.supervise(), [ours.rank(), ours.rank()]
            await told(supervisor, SupervisorHello("g", "s", "h", (0, 1), SECRET))
            for slot, rank in enumerate(ranks):
                rank.send(RankHello(RankId(slot, f"s.{slot}"), TERMS, host="h", is_ready=True, secret=SECRET))
            await asyncio.gather(*(anext(rank) for rank in ranks))

            async def stands() -> Any:
                [status] = await ours.runs(run)
                return status if status.verdict == "stands" else None

            before = await until(stands)
            entries = (SupervisorHello("z", "z", "h", (), GUESS), SupervisorHello("g", "x", "h", (0, 1), GUESS))
            for entry in entries:
                for asked in (StopAsked("a stranger says so"), HostExcluded("a stranger says so")):
                    async with theirs.supervise() as stranger:
                        comes = replace(entry, incarnation=f"{entry.incarnation}-{type(asked).__name__}")
                        answers = await told(stranger, comes, asked, is_all=True)
                        assert attacker.is_member or is_denied(answers[-1], attacker)
                        if attacker.is_member and entry.name == "g":
                            assert "has the same name" in str(why(answers[-1]))
            late = RankHello(RankId(1, "x"), TERMS, attempt=9, is_ready=True, secret=GUESS)
            async with theirs.rank() as rank:
                [answer] = await told(rank, late, FinishReport(before.counters.number))
                assert why(answer) is not None
            key = theirs.put_key(before.counters.number, KeyKind.ITERATION, "k", b"", slot=0, secret=GUESS)
            assert isinstance(await refusal(key), NotPermitted)
            after = await stands()
            assert after is not None
            assert (after.counters, after.stop, after.is_complete) == (before.counters, None, False)
            assert [(s.name, s.is_connected) for s in after.supervisors if s.name == "g"] == [("g", True)]
            assert [host.supervisor for host in after.excluded] == ["z"] * attacker.is_member
            if attacker.is_member:
                noted = [e for e in secured.audit if e["what"] == "StopAsked" and f"run={run}, by=z" in e["target"]]
                assert [entry["result"] for entry in noted] == [
                    "refused: this supervisor does not take part in the run, so its request affects only itself"
                ]
                assert "ignored supervisor z, which has no rank in run" in secured.lighthouse.log()
            for stream in (supervisor, *ranks):
                stream.cancel()

    async def test_c3_a_further_host_of_the_group_is_none(self, manager: Manager, attacker: Attacker) -> None:
        """`Node` ended a group's supervisor."""
        async with AsyncManagerClient(manager.address, attacker.secret) as client, asyncio.timeout(PATIENCE_S):
            async with client.host() as node:
                [*_, answer] = await told(node, HostHello("held", "default", 1, 2, 1, "x"), HostEndAsked(143))
                assert why(answer) is not None
        assert manager.is_alive


@ATTACKERS
class TestIdentity:
    """C4. What the status showed was enough to take a group over."""

    async def test_c4_a_session_is_its_managers(self, secured: Secured, attacker: Attacker) -> None:
        job = f"c4-{attacker.role}"
        async with at(secured, Role.JOIN, job) as ours, ours.session() as first, at(secured, attacker, job) as theirs:
            await told(first, hello("g", SECRET, "the-incarnation"))
            async with theirs.session() as stranger:
                [answer] = await told(stranger, hello("g", GUESS, "the-incarnation"))
                assert is_denied(answer, attacker) or "holds a session" in str(why(answer))
            joins = theirs.quorum(group("g", "the-incarnation"), timeout_s=5)
            assert await refusal(joins)
            [shown] = (await ours.status(job)).jobs
            assert [member.replica_id for member in shown.members] == ["g"]
            if attacker.role is not None:
                assert "the-incarnation" not in repr(await theirs.status(job))

    @pytest.mark.parametrize("call", [*CALLS_OF_A_RANK, "Watch"])
    def test_c4_a_rank_is_its_managers(self, secured: Secured, manager: Manager, attacker: Attacker, call: str) -> None:
        """Neither with a token of the lighthouse."""
        act = {**CALLS_OF_A_RANK, "Watch": lambda client: next(client.watch(WatchHello(0, "of a stranger")))}[call]
        for secret in {attacker.secret, secured.coordinator(attacker.role).token}:
            with ManagerClient(manager.address, secret) as stranger, pytest.raises(NotPermitted) as refused:
                act(stranger)
            assert MANAGER_SECRET_VARIABLE in str(refused.value), "the remedy"
        assert "a stranger says so" not in manager.log(), "M2: nothing is logged in a rank's name"


@pytest.mark.parametrize("secret", ["", THEIRS], ids=["no secret", "another group's"])
def test_c4_a_watch_in_a_ranks_name_is_refused_and_ends_none(manager: Manager, secret: str) -> None:
    with ManagerClient(manager.address, OURS) as ours, ManagerClient(manager.address, secret) as stranger:
        watch = ours.watch(WatchHello(0, "of the rank"))
        assert isinstance(next(watch), WatchOpened)
        with pytest.raises(NotPermitted):
            next(stranger.watch(WatchHello(0, "of a stranger")))
        ours.quorum(0, 0, "http://rank:1", timeout_s=PATIENCE_S)
        assert ours.should_commit(0, 0, True, timeout_s=PATIENCE_S)
        watch.cancel()


def test_c4_where_an_agent_serves_its_state_is_told_to_its_group(manager: Manager) -> None:
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


@ATTACKERS
class TestSecrets:
    async def test_h1_what_ranks_print_is_for_operators(self, secured: Secured, attacker: Attacker) -> None:
        run = f"h1-{attacker.role}"
        async with at(secured, Role.JOIN, run=run) as ours, ours.supervise() as supervisor:
            await told(supervisor, SupervisorHello("g", "s", "h", (0,), SECRET))
            supervisor.send(ProcessLost(RankId(0, "s.0"), "SIGSEGV", (OUTPUT,)))
            async with at(secured, Role.OPERATE, run=run) as operator:

                async def mine() -> Any:
                    return [each for each in await operator.incidents() if run in repr(each)]

                found = await until(mine)
                assert OUTPUT in repr(await operator.incident(found[0].id)), "it is kept"
            async with at(secured, attacker, run=run) as theirs:
                for asked in (theirs.runs(run), theirs.status(), theirs.incidents()):
                    try:
                        assert OUTPUT not in repr(await asked)
                    except NotPermitted:
                        assert attacker.role is None
                assert isinstance(await refusal(theirs.incident(found[0].id)), NotPermitted)
        token = secured.coordinator(attacker.role).token
        for path in ("/status", "/metrics", f"/incidents/{found[0].id}"):
            code, body = await asyncio.to_thread(secured.get, path, token)
            assert OUTPUT not in body
            assert (code == 200) == (attacker.role is Role.VIEW and "incidents" not in path), path

    async def test_h6_to_be_local_grants_nothing(self, secured: Secured, attacker: Attacker) -> None:
        """All of these come from the loopback, as what a forwarder passes on does."""
        token = secured.coordinator(attacker.role).token
        code, said = await asyncio.to_thread(secured.get, "/control", token)
        assert (code, json.loads(said)["may_act"]) == (200, False)


@ATTACKERS
class TestCost:
    """What took a gigabyte, or a lighthouse's whole time: one attacker gets a small share of it."""

    async def test_h2_large_sets_of_ranks_cost_what_they_weigh(self, secured: Secured, attacker: Attacker) -> None:
        odd = RankSet.from_bytes(b"\xaa" * (MAX_GROUP_WORLD_SIZE // 8))
        before_mib = memory_mib(secured.lighthouse.pid)
        async with at(secured, attacker, f"h2-{attacker.role}") as client:
            sessions = [client.session() for _ in range(100)]
            for number, session in enumerate(sessions):
                [answer] = await told(session, hello(f"g{number}", THEIRS, size=MAX_GROUP_WORLD_SIZE, missing=odd))
                assert is_denied(answer, attacker) or attacker.is_member
            assert memory_mib(secured.lighthouse.pid) - before_mib < 100, "it was 400 MiB for so many"
            for session in sessions:
                session.cancel()

    async def test_h3_a_supervisor_has_the_slots_of_one_host(self, secured: Secured, attacker: Attacker) -> None:
        async with at(secured, attacker, run=f"h3-{attacker.role}") as client, client.supervise() as stream:
            [answer] = await told(stream, SupervisorHello("a", "i", slots=tuple(range(65536)), secret=THEIRS))
            assert is_denied(answer, attacker) or "slots: has 65536 entries; 0 to 256 are" in str(why(answer))

    async def test_h4_names_that_it_makes_up_keep_no_group_out(self, secured: Secured, attacker: Attacker) -> None:
        """1,000 jobs, then as many ids."""
        refused = 0
        for number in range(300):
            async with at(secured, attacker, f"h4-{attacker.role}-{number}") as client:
                try:
                    await client.heartbeat("x")
                except (NotPermitted, LimitReached):
                    refused += 1
        job = f"h4-{attacker.role}"
        async with at(secured, attacker, job) as client:
            for number in range(1000):
                try:
                    await client.heartbeat(f"x{number}")
                except (NotPermitted, LimitReached):
                    refused += 1
        assert refused > 90 if attacker.is_member else refused == 1300
        assert await honest_quorum(secured, job)
        assert await honest_quorum(secured, f"{job}-new")

    async def test_low_a_flood_of_keys_ends(self, secured: Secured, attacker: Attacker) -> None:
        """2,543 durable writes in 8 s, of one that was no rank."""
        async with at(secured, attacker, run=f"keys-{attacker.role}") as client:
            for _ in range(50):
                key = client.put_key(0, KeyKind.ITERATION, "k", b"x" * 4096, slot=0, secret=GUESS)
                assert await refusal(key)


@ATTACKERS
class TestText:
    async def test_m1_absurd_numbers_break_no_reader(self, secured: Secured, attacker: Attacker) -> None:
        job = f"m1-{attacker.role}"
        sample = ProgressSample(1, (OpenPhase("forward"),), still_s=ABSURD)
        view = GroupView("x", "i", (RankView(RankName("x", 0), sample, ABSURD, ABSURD),))
        async with at(secured, attacker, job) as client, client.session() as session:
            answers = await told(session, hello("x", THEIRS), Heartbeat(1, progress=view), Heartbeat(2, progress=view))
            assert attacker.is_member or is_denied(answers[-1], attacker)
            view_token = secured.coordinator(Role.VIEW).token
            _, status = await asyncio.to_thread(secured.get, "/status", view_token)
            json.loads(status, parse_constant=not_json)
            _, metrics = await asyncio.to_thread(secured.get, "/metrics", view_token)
            assert not re.search(
                r"^lighthouse_rank_phase_seconds.* (\+Inf|1e\+3\d\d|1\.7e\+308)$", metrics, re.MULTILINE
            )
            where = {"LIGHTHOUSE_ADDRESS": secured.join_string(Role.VIEW)}
            for verb in ("status", "ranks", "incidents"):
                said = await asyncio.to_thread(run_cli, LIGHTHOUSE_CODE, verb, env=where)
                assert (said.returncode, "Traceback" in said.stderr) == (0, False), said.stderr

    async def test_m2_no_line_of_the_log_is_anothers(self, secured: Secured, attacker: Attacker) -> None:
        forged = "bad disk\n2026-01-01T00:00:00Z I lighthouse.server.daemon: all is well"
        async with at(secured, attacker, run=f"m2-{attacker.role}") as client:
            for asked in (StopAsked(forged), HostExcluded(forged)):
                async with client.supervise() as stream:
                    await told(stream, SupervisorHello("m2", "i", secret=THEIRS), asked, is_all=True)
        assert not [line for line in secured.lighthouse.log().splitlines() if line.startswith("2026-01-01")]

    async def test_low_a_body_that_is_no_order_is_refused(self, secured: Secured, attacker: Attacker) -> None:
        """Deep JSON, and half a character, were a traceback."""
        token = secured.coordinator(attacker.role).token
        for body in (b"[" * 50_000, b'{"job": "default", "replica_id": "\\ud800", "reason": ""}'):
            code, _ = await asyncio.to_thread(secured.post, "/kill", body, token)
            assert 400 <= code < 500
        assert "Traceback" not in secured.lighthouse.log()


def test_calls_that_are_reset_at_once_cancel_nobody_else_s(secured: Secured) -> None:
    """One connection without a credential filled the queue of all callers, and 60 MiB."""
    before_mib, answered = memory_mib(secured.lighthouse.pid), 0
    command = [sys.executable, "-m", "tests.reset_flood", str(secured.lighthouse.port), "3"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as stranger:
        while stranger.poll() is None:
            with LighthouseClient(secured.coordinator(Role.JOIN)) as client:
                client.status(timeout_s=PATIENCE_S)
            answered += 1
        assert stranger.stdout is not None
        assert json.loads(stranger.stdout.read())["calls"] > 0
    assert answered > 0
    assert memory_mib(secured.lighthouse.pid) - before_mib < 30


# -- the whole list


ITEMS = ("C1", "C2", "C3", "C4", *(f"H{n}" for n in range(1, 7)), *(f"M{n}" for n in range(1, 9)), "Low")


@pytest.mark.parametrize("item", ITEMS)
def test_each_attack_has_its_test_here_or_elsewhere(item: str) -> None:
    here = re.findall(rf"def test_({item.lower()}_\w+)", Path(__file__).read_text())
    assert here or ELSEWHERE.get(item), item
    for test in ELSEWHERE.get(item, ()):
        path, *names = test.split("::")
        body: list[ast.stmt] = ast.parse((ROOT / TESTS / path).read_text()).body
        for name in names:
            found = [each for each in body if getattr(each, "name", "") == name]
            assert found, test
            body = getattr(found[0], "body", [])


def memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1024


def not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
