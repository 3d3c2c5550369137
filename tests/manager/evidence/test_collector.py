"""What a manager finds out of its ranks, and how it names what it cannot."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.incident import EvidenceAsked, ProcessSnapshot, RankEvidence, SelfReport
from lighthouse_protocol.messages.progress import GroupView
from manager import evidence
from manager.evidence import ELSEWHERE, NO_OUTPUT, EvidenceCollector, probe_alone
from manager.group.driver import Watch
from tests.lighthouse_protocol.views import rank as view_of
from tests.processes import PATIENCE_S

SEEN = ProcessSnapshot("from outside", "pid 71: S (sleeping)", ("its last line",))
STOPPED = ProcessSnapshot("", "T (stopped)", missing=("stacks: it is stopped",), is_stopped=True)


class Rank:
    """That is watched. `asked` has the numbers of what it was asked."""

    def __init__(self, desk: EvidenceCollector, rank: int = 1, *, is_local: bool = False, old: bool = False) -> None:
        self.desk = desk
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        offer = None if old else session.EvidenceOffer(44, 3)
        hello = session.WatchHello(rank, f"w{rank}", 70 + rank, "boot", 1, f"host-{rank}", offer=offer)
        self.watch = Watch(hello, self, is_local, heard_at=0.0)
        desk.add_watch(self.watch)

    def send(self, message: session.ToRank) -> None:
        assert isinstance(message, EvidenceAsked)
        self.asked.put_nowait(message.number)

    def end(self, error: object = None) -> None:
        """As the driver does."""
        self.watch.is_open = False
        self.desk.drop_watch(self.watch)

    def says_something(self) -> None:
        self.watch.heard_at = asyncio.get_running_loop().time()

    async def answer(self, stacks: str = "own", recorded: str = "[]", *missing: str) -> None:
        self.desk.take_self_report(self.watch, SelfReport(await self.asked.get(), stacks, recorded, missing))


class Group:
    """Of three ranks. `sent` is what the lighthouse is told; `outside`: what those of this host look like; `signalled`:
    the pids of those that were sent the signal; `place`: where the ranks are."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[session.ToLighthouse] = asyncio.Queue()
        self.outside = SEEN
        self.signalled: list[int] = []
        self.place = GroupView("a", "i", ())
        self.desk = EvidenceCollector(3, self.sent.put_nowait, self.look)

    async def look(self, request: session.WatchHello, is_here: bool) -> ProcessSnapshot:
        if not is_here:
            return await probe_alone(request, is_here)
        if request.offer is None:
            return replace(self.outside, stacks="", missing=("stacks: it has no handler that writes its stacks",))
        self.signalled.append(request.pid)
        return self.outside

    async def given(self, number: int = 1) -> dict[int, RankEvidence]:
        """The ranks of the answer to that request."""
        found: dict[int, RankEvidence] = {}
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(message := await self.sent.get(), session.Evidence):
                assert message.number == number
                found[message.rank.group_rank] = message.rank
        assert message == session.EvidenceDone(number, self.place if self.place.ranks else None)
        return found

    def view(self) -> GroupView:
        return self.place

    def request(self, number: int = 1) -> "asyncio.Task[RankEvidence]":
        """That of rank 1."""
        self.desk.collect_evidence(session.EvidenceRequest(number, (1,)), self.view)

        async def given() -> RankEvidence:
            return (await self.given(number))[1]

        return asyncio.create_task(given())


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    made = Group()
    yield made
    made.desk.close()


NONE = "all evidence: it has not opened a watch"


@pytest.mark.parametrize(
    ("named", "missing"),
    [((), {0: NONE, 1: NONE, 2: NONE}), ((2, 2, 7), {2: NONE, 7: "all evidence: the group has no such rank"})],
)
async def test_all_ranks_or_those_that_were_named(group: Group, named: tuple[int, ...], missing: dict[int, str]):
    group.desk.collect_evidence(session.EvidenceRequest(1, named), group.view)
    assert {n: rank.missing for n, rank in (await group.given()).items()} == {n: (why,) for n, why in missing.items()}


async def test_the_end_says_where_the_ranks_are_by_then(group: Group):
    rank_1 = Rank(group.desk)
    asked = group.request()
    await asyncio.sleep(0)
    group.place = GroupView("a", "i", (view_of(1, "loader", group="a"),))
    await rank_1.answer()
    await asked


async def test_a_rank_elsewhere_says_it_itself(group: Group):
    rank_1 = Rank(group.desk)
    asked = group.request()
    await rank_1.answer("own stacks", '[{"seq": 3}]', "other: why")
    rank = await asked
    assert (rank.rank_incarnation, rank.pid, rank.host) == ("w1", 71, "host-1")
    assert (rank.stacks, rank.flight_recorder, rank.process) == ("own stacks", '[{"seq": 3}]', "")
    assert rank.missing == (ELSEWHERE, NO_OUTPUT, "other: why")
    assert 0 <= rank.took_s < PATIENCE_S


async def test_a_rank_of_this_host_is_looked_at_from_outside_and_never_signalled_while_it_answers(group: Group):
    rank_1 = Rank(group.desk, is_local=True)
    asked = group.request()
    await rank_1.answer("own stacks")
    rank = await asked
    assert (rank.stacks, rank.process, rank.output, rank.missing) == ("own stacks", SEEN.process, SEEN.output, ())
    assert group.signalled == []


async def test_nor_while_it_says_anything_at_all(group: Group, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evidence, "ANSWERED_WITHIN_S", 0.2)
    monkeypatch.setattr(evidence, "UNDER_WAY_S", 0.0)
    rank_1 = Rank(group.desk, is_local=True)
    asked = group.request()
    await rank_1.asked.get()
    rank_1.says_something()
    assert "stacks: it is running Python, and a signal might crash it" in (await asked).missing
    assert group.signalled == []


async def test_a_rank_that_runs_no_python(group: Group, monkeypatch: pytest.MonkeyPatch):
    """What it had said before it was asked may come a little later."""
    monkeypatch.setattr(evidence, "ANSWERED_WITHIN_S", 0.05)
    silent = Rank(group.desk, is_local=True)
    Rank(group.desk, 2)
    group.desk.collect_evidence(session.EvidenceRequest(1, (1, 2)), group.view)
    silent.says_something()
    found = await group.given()
    why = "no answer within 0.05 s; something prevents it from running Python"
    assert (found[1].stacks, group.signalled) == (SEEN.stacks, [71])
    assert found[1].missing == (f"Flight Recorder: {why}",)
    assert found[2].missing == (ELSEWHERE, NO_OUTPUT, f"stacks: {why}", f"Flight Recorder: {why}")


@pytest.mark.parametrize("has_ended", [False, True], ids=["it is not waited for", "it is looked at after its watch"])
async def test_a_stopped_one(group: Group, monkeypatch: pytest.MonkeyPatch, has_ended: bool):
    """It is lost within seconds, and is never signalled."""
    monkeypatch.setattr(evidence, "ANSWERED_WITHIN_S", 10 * PATIENCE_S)
    group.outside = STOPPED
    rank_1 = Rank(group.desk, is_local=True)
    if has_ended:
        rank_1.end()
    rank = await group.request()
    assert (rank.stacks, rank.process, group.signalled) == ("", "T (stopped)", [])
    stopped = ("Flight Recorder: its process is stopped", "stacks: its process is stopped and cannot run a handler")
    ended = ("stacks: its watch has ended", "Flight Recorder: its watch has ended")
    assert rank.missing == (ended if has_ended else stopped)
    assert rank_1.asked.empty() == has_ended


async def test_a_rank_that_ends_while_it_is_asked(group: Group):
    rank_1 = Rank(group.desk)
    asked = group.request()
    await rank_1.asked.get()
    rank_1.end()
    why = ("stacks: its watch has ended", "Flight Recorder: its watch has ended")
    assert (await asked).missing == (ELSEWHERE, NO_OUTPUT, *why)


async def test_an_older_rank_is_not_asked(group: Group):
    rank_1 = Rank(group.desk, old=True)
    assert "Flight Recorder: its Agent does not answer requests for evidence" in (await group.request()).missing
    assert rank_1.asked.empty()


async def test_the_answer_of_another_process_or_to_another_question_is_none(group: Group):
    old, rank_1 = Rank(group.desk), Rank(group.desk)
    asked = group.request()
    number = await rank_1.asked.get()
    group.desk.take_self_report(old.watch, SelfReport(number, "of the old one"))
    group.desk.take_self_report(rank_1.watch, SelfReport(number + 1, "of another time"))
    old.end()
    group.desk.take_self_report(rank_1.watch, SelfReport(number, "its own"))
    assert (await asked).stacks == "its own"


async def test_who_asks_twice_at_a_time_is_told_the_same(group: Group):
    rank_1 = Rank(group.desk)
    for _ in range(2):
        group.desk.collect_evidence(session.EvidenceRequest(1, (1,)), group.view)
    await rank_1.answer("once")
    assert [(await group.given())[1].stacks for _ in range(2)] == ["once", "once"]
    assert rank_1.asked.empty()
    anew = group.request(2)
    await rank_1.answer("anew")
    assert (await anew).stacks == "anew"


async def test_a_look_that_fails_or_takes_too_long_is_named(
    group: Group, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    async def look(request: session.WatchHello, is_here: bool) -> ProcessSnapshot:
        if request.rank_incarnation == "w1":
            raise ZeroDivisionError(f"{request.group_rank} {is_here}")
        await asyncio.sleep(10 * PATIENCE_S)
        raise AssertionError

    monkeypatch.setattr(evidence, "GATHERED_WITHIN_S", 1.05)
    group.desk = EvidenceCollector(3, group.sent.put_nowait, look)
    for number in (1, 2):
        Rank(group.desk, number, old=True)
    group.desk.collect_evidence(session.EvidenceRequest(1, (1, 2)), group.view)
    missing = {n: rank.missing for n, rank in (await group.given()).items()}
    late = "all evidence: not collected within 0.05 s"
    assert missing == {1: ("all evidence: ZeroDivisionError('1 False')",), 2: (late,)}
    assert "cannot collect evidence about rank 1" in caplog.text
