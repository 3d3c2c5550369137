"""torchft's defects (the numbers of reference/torchft.md, "Its defects"), as far as pure machines decide them.

Each of these tests is a story that torchft 0.2 ends badly.
"""

from collections.abc import Callable

import pytest

from lighthouse.quorum.rules.events import QuorumFormed, Withdrawn
from lighthouse.quorum.rules.machine import QuorumMachine
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, LimitReached, Unrecoverable, WrongState
from manager.group.rules.commit import CommitMachine, Decided, Opened, StepDecided, Voted
from manager.group.rules.commit import Withdrawn as VoteWithdrawn
from manager.group.rules.gather import GatherMachine, GroupJoined, JoinFailed, QuorumReceived, RankAnswered, RankRefused
from tests.defects.opcodes import count
from tests.lighthouse.builders import beat, beating, formed, group, join, machine, refused, ticked, training
from tests.manager.builders import ask, gathered, member, quorum
from tests.manager.builders import refused as rank_refused


class TestDefect01AVoteOutlivesItsCall:
    def test_defect_01_a_vote_outlives_its_call(self):
        """Rank 0 votes for step 1 and times out; rank 1's vote for step 2 was answered "commit" alone."""
        m = CommitMachine(2)
        m.handle(Voted(1, 0, step=1, vote=True))
        m.handle(VoteWithdrawn(1))
        assert m.handle(Voted(2, 1, step=2, vote=True)) == []
        assert m.handle(Voted(3, 0, step=2, vote=True)) == [StepDecided(0, 2, True), Decided(2, True), Decided(3, True)]

    def test_defect_01_nor_within_one_step(self):
        m = CommitMachine(2)
        m.handle(Opened(1, 1))
        m.handle(Voted(1, 0, step=1, vote=True))
        m.handle(VoteWithdrawn(1))
        assert m.handle(Voted(2, 1, step=1, vote=True)) == []

    @pytest.mark.parametrize("reopened", [True, False])
    def test_defect_01_a_no_is_sticky(self, reopened: bool):
        m = CommitMachine(2)
        m.handle(Opened(1, 1))
        m.handle(Voted(1, 0, step=1, vote=False))
        assert m.handle(Voted(2, 1, step=1, vote=True)) == [Decided(2, False)]
        if reopened:
            m.handle(Opened(2, 1))
        assert m.handle(Voted(3, 0, step=1, vote=True)) == []
        assert m.handle(Voted(4, 1, step=1, vote=True)) == [
            StepDecided(1 + reopened, 1, True),
            Decided(3, True),
            Decided(4, True),
        ]


def test_defect_02_a_late_answer_of_an_earlier_round_is_handed_to_the_next():
    """The manager asked for step 5, its ranks gave up and asked again for step 6; then the first answer comes."""
    m = gathered(1, step=5)
    m.handle(ask(2, 0, 6))
    assert m.handle(QuorumReceived(1, quorum(member("a", 5), quorum_id=1))) == []
    effects = m.handle(QuorumReceived(2, quorum(member("a", 6), quorum_id=1)))
    assert [(e.call, e.assignment.max_step) for e in effects if isinstance(e, RankAnswered)] == [(2, 6)]


class TestDefect03ACallerWhoseCallEndedIsHandedOut:
    def test_defect_03_when_it_withdrew(self):
        m = machine(min_replicas=2)
        m.handle(join(1, "a"), now=0)
        m.handle(Withdrawn(1), now=0.1)
        assert m.handle(join(2, "b"), now=0.2) == []
        assert m.handle(join(3, "c"), now=0.3) == []
        assert ticked(m, 0.3, 10) == [formed(1, (2, 3), group("b"), group("c"))]

    def test_defect_03_when_it_had_trained(self):
        m = training("abc", min_replicas=2)
        m.handle(join(4, "c", step=1), now=1)
        m.handle(Withdrawn(4), now=1.5)
        m.handle(join(5, "a", step=1), now=2)
        m.handle(join(6, "b", step=1), now=2)
        [effect] = beating(m, "", 2, 10)
        assert [p.replica_id for p in effect.quorum.participants] == ["a", "b"]


class TestDefect05ShrinkingToNobody:
    def test_defect_05_shrink_only_without_overlap_gives_an_empty_quorum(self):
        """Everybody has restarted, and asks to shrink."""
        m = training("ab")
        for call, name in enumerate("ab", start=3):
            m.handle(join(call, name, incarnation="i2", shrink_only=True), now=1)
        assert m.quorum.participants == tuple(group(n, incarnation="i2", shrink_only=True) for n in "ab")
        assert ticked(m, 1, 100) == []

    def test_defect_05_and_then_one_per_tick(self):
        m = training("ab")
        effects = m.handle(join(3, "c", shrink_only=True), now=6)
        for now in range(7, 60):
            effects += m.tick(now)
        assert effects == [formed(2, (3,), group("c", shrink_only=True))]

    def test_defect_05_min_replicas_is_skipped_on_the_fast_path(self):
        """b has restarted: of the last quorum only a is left, and it asks to shrink."""
        m = training("ab", min_replicas=2)
        m.handle(join(3, "b", incarnation="i2"), now=1)
        assert m.handle(join(4, "a", shrink_only=True), now=1) == []
        assert beating(m, "ab", 1, 200) == []


class TestDefect06OneIdTwoCallers:
    def test_defect_06_the_same_replica_id_from_a_new_address_keeps_the_quorum_id(self):
        m = training("ab")
        m.handle(join(3, "a", incarnation="i1", address="moved.example:1"), now=1)
        [effect] = m.handle(join(4, "b"), now=1)
        assert (effect.quorum.quorum_id, effect.is_new) == (2, True)

    @pytest.mark.parametrize("incarnations", [("i1", "i2"), ("", "")])
    def test_defect_06_a_second_caller_takes_over_an_id(self, incarnations: tuple[str, str]):
        first, second = incarnations
        m = machine(min_replicas=2)
        m.handle(join(1, "a", incarnation=first), now=0)
        thief = group("a", incarnation=second, address="thief.example:1")
        assert m.handle(join(2, thief), now=1) == [refused(2, DuplicateReplica, "a.example", "thief.example")]
        assert m.handle(join(3, "b"), now=2) == [formed(1, (1, 3), group("a", incarnation=first), group("b"))]


class TestDefect07OneThatRanAheadAlone:
    """max_step without a majority. With min_replicas 1 that is what was asked for; a state that has diverged is not."""

    def test_defect_07_a_diverged_state_overwrites_the_others(self):
        m = training("abc")
        m.handle(join(4, "c", step=5, tag_quorum_id=9), now=1)
        m.handle(join(5, "a", step=5, tag_quorum_id=1), now=1)
        [effect] = m.handle(join(6, "b", step=5, tag_quorum_id=1), now=1)
        assert [p.step for p in effect.quorum.participants] == [5, 5, 4], "c heals from the two that agree"

    def test_defect_07_half_a_commit_overwrites_the_others(self):
        """c's ranks disagree whether step 6 was committed."""
        m = training("abc")
        m.handle(join(4, "c", step=6, ranks_disagree=True), now=1)
        m.handle(join(5, "a", step=5, tag_quorum_id=1), now=1)
        [effect] = m.handle(join(6, "b", step=5, tag_quorum_id=1), now=1)
        assert [p.step for p in effect.quorum.participants] == [5, 5, 4]

    def test_defect_07_a_minority_runs_ahead_at_all(self):
        m = training("abc", min_replicas=2)
        m.handle(join(4, "c"), now=1)
        assert beating(m, "c", 1, 300) == []


class TestDefect09AStragglerOutlastsEveryCall:
    def test_defect_09_join_timeout_equals_the_callers_timeout(self):
        m = training("abc", join_timeout_s=60)
        for call, name in enumerate("ab", start=4):
            m.handle(join(call, name, step=1, deadline_at=61), now=1)
        effects = beating(m, "abc", 1, 61)
        assert effects == [formed(2, (4, 5), group("a", step=1), group("b", step=1))]

    def test_defect_09_it_is_answered_before_the_first_deadline(self):
        m = training("abc", join_timeout_s=60)
        m.handle(join(4, "a", deadline_at=31), now=1)
        m.handle(join(5, "b", deadline_at=61), now=1)
        assert beating(m, "abc", 1, 29.9) == []
        assert len(beating(m, "abc", 29.9, 30.5)) == 1


class TestDefect12TheDeadAreNeverForgotten:
    def test_defect_12_dead_ids_are_never_forgotten(self):
        m = machine(max_replicas=100_000)
        for n in range(2000):
            m.handle(beat(f"dead{n}"), now=n)
            for event in (join(2 * n, f"gone{n}"), Withdrawn(2 * n)):
                m.handle(event, now=n)
        kept = [m.roster._members, m.roster._due, m.joins._joined, m.joins._calls, m.roster.routable, m.roster.sizes]
        assert max(map(len, kept)) <= 2 * (5 + 60 + 5), "those of the last minute"
        ticked(m, 1999, 3000)
        assert [len(things) for things in kept] == [0] * 6
        assert len(m.current.replica_ids) <= 1

    def test_defect_12_nor_those_who_come_and_go(self):
        m = machine()
        for n in range(1000):
            m.handle(beat("a", f"i{n}"), now=7 * n)
            ticked(m, 7 * n, 7 * n + 6)
        assert len(m.roster._due) <= 12

    def test_defect_12_nor_the_managers(self):
        m, c = GatherMachine("a", 1), CommitMachine(1)
        for n in range(500):
            m.handle(ask(n, 0, n, rank_incarnation=f"w{n % 7}"))
            m.handle(QuorumReceived(m._round, quorum(member("a", n), quorum_id=n)))
            c.handle(Opened(n, n))
            c.handle(Voted(n, 0, n, True))
        assert (len(m._asks), len(m._last)) == (0, 1)
        assert len(c._decided) <= 16

    @pytest.mark.parametrize("story", ["first", "steady", "failed", "stragglers", "shrinking", "restarted", "replaced"])
    def test_defect_12_a_round_costs_the_square_of_the_groups(self, story: str):
        """Counted, not timed: three times the groups, about three times the work (sorting adds a little)."""
        work = {groups: count(lambda groups=groups: ROUNDS[story](groups)) for groups in (100, 300)}
        assert work[300] < 4 * work[100]

    def test_defect_12_an_event_that_changes_nothing_costs_the_same_among_many(self):
        def cost(groups: int, *, shrinking: bool) -> int:
            m, names = trained(groups)
            m.handle(join(10_000, names[0], shrink_only=shrinking), now=1)
            for name in names[1 : groups // 2]:
                m.handle(join(10_000 + int(name[1:]), name, step=1), now=1)
            return max(count(lambda e=e: m.handle(e, 1)) for e in (beat(names[-1]), beat(names[1]), Withdrawn(77_777)))

        assert cost(400, shrinking=False) <= 1.2 * cost(100, shrinking=False)
        assert cost(400, shrinking=True) <= 1.2 * cost(100, shrinking=True)


def trained(groups: int) -> tuple[QuorumMachine, list[str]]:
    names = [f"g{n:05}" for n in range(groups)]
    m = machine(heartbeat_timeout_s=10)
    for name in names:
        m.handle(beat(name), now=0)
    play(m, names, now=0, first_call=0)
    assert len(m.quorum.participants) == groups
    return m, names


def play(m: QuorumMachine, names: list[str], now: float, first_call: int, **fields: object) -> list[QuorumFormed]:
    """One round: everybody beats and asks."""
    effects: list[QuorumFormed] = []
    for call, name in enumerate(names, start=first_call):
        effects += m.handle(beat(name, str(fields.get("incarnation", "i1"))), now)
        effects += m.handle(join(call, name, **fields), now)
    return effects


def first(groups: int) -> None:
    trained(groups)


def steady(groups: int) -> None:
    m, names = trained(groups)
    for step in range(1, 4):
        assert len(play(m, names, step / 10, step * 10_000, step=step)) == 1


def failed(groups: int) -> None:
    m, names = trained(groups)
    assert play(m, names, 1, 10_000, commit_failures=1)[0].is_new


def stragglers(groups: int) -> None:
    """Half of them hang, beating."""
    m, names = trained(groups)
    play(m, names[: groups // 2], 1, 10_000, step=1)
    for now in (9, 17, 25, 33, 41, 49, 57):
        for name in names:
            assert not m.handle(beat(name), now)
    [effect] = m.tick(61)
    assert len(effect.quorum.participants) == groups // 2


def shrinking(groups: int) -> None:
    m, names = trained(groups)
    assert len(play(m, names, 1, 10_000, step=1, shrink_only=True)) == 1


def restarted(groups: int) -> None:
    m, names = trained(groups)
    m.tick(20)
    for name in names:
        m.handle(beat(name, "i2"), now=20)
    play(m, names, 20, 10_000, incarnation="i2")
    assert len(m.quorum.participants) == groups


def replaced(groups: int) -> None:
    """All are dead; as many others come, while one more only beats."""
    m, names = trained(groups)
    m.tick(20)
    m.handle(beat("late"), now=20)
    play(m, [f"new-{name}" for name in names], 20, 10_000)
    for name in names:
        m.handle(beat(f"new-{name}"), now=24)
    m.handle(join(99_999, "late"), now=24)
    assert len(m.quorum.participants) == groups + 1


ROUNDS: dict[str, Callable[[int], None]] = {
    work.__name__: work for work in (first, steady, failed, stragglers, shrinking, restarted, replaced)
}


def test_the_count_would_notice_a_square():
    def square(groups: int) -> int:
        return sum(1 for _ in range(groups) for _ in range(groups))

    assert count(lambda: square(40)) > 8 * count(lambda: square(10))


class TestDefect14AnyRankCompletesABarrier:
    @pytest.mark.parametrize("rank", [-1, 2, 5])
    def test_defect_14_a_rank_out_of_range_completes_a_barrier(self, rank: int):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0))
        assert m.handle(ask(2, rank)) == [rank_refused(2, InvalidRequest, "rank:")]
        c = CommitMachine(2)
        c.handle(Voted(1, 0, 5, True))
        assert c.handle(Voted(2, rank, 5, True)) == [rank_refused(2, InvalidRequest, "rank:")]
        assert c.is_voting

    def test_defect_14_a_rank_given_twice_completes_a_barrier(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0))
        assert not any(isinstance(e, GroupJoined) for e in m.handle(ask(2, 0)))
        c = CommitMachine(2)
        c.handle(Voted(1, 0, 5, True))
        assert not any(isinstance(e, Decided) for e in c.handle(Voted(2, 0, 5, True)))

    def test_defect_14_the_steps_of_the_ranks_are_not_compared(self):
        m = GatherMachine("a", 2)
        m.handle(ask(1, 0, 5, rank_incarnation=""))
        assert m.handle(ask(2, 1, 6, rank_incarnation="")) == [
            rank_refused(1, Unrecoverable, "5", "6"),
            rank_refused(2, Unrecoverable, "5", "6"),
        ]
        c = CommitMachine(2)
        c.handle(Voted(1, 0, 5, True))
        assert c.handle(Voted(2, 1, 6, True)) == [rank_refused(2, WrongState, "5", "6")]


def test_defect_10_a_lighthouse_error_never_reaches_the_ranks():
    m = gathered(2)
    effects = m.handle(JoinFailed(1, LimitReached("full")))
    assert [(e.call, str(e.error)) for e in effects if isinstance(e, RankRefused)] == [(1, "full"), (2, "full")]


def test_defect_08_at_half_of_the_ids_no_quorum_ever_forms():
    m = training("abcd", join_timeout_s=60)
    for call, name in enumerate("ab", start=5):
        m.handle(join(call, name, deadline_at=1000), now=1)
    assert beating(m, "abcd", 1, 61) == [formed(2, (5, 6), group("a"), group("b"))]


def test_defect_04_quorum_id_restarts_at_1_with_the_lighthouse():
    """The new lighthouse starts at another id, and above whatever a member was told."""
    survivors: list[Participant] = [group("a", step=3, seen_quorum_id=40), group("b", step=3, tag_quorum_id=41)]
    m = machine(first_quorum_id=1, min_replicas=2)
    m.handle(join(1, survivors[0]), now=0)
    assert m.handle(join(2, survivors[1]), now=0)[0].quorum.quorum_id > 41
