"""The votes for a step: events in, the whole list of effects out; and drawn events against a witness."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse_protocol.refusals import InvalidRequest, Superseded, Unrecoverable, WrongState
from manager.group.rules.commit import (
    DECISIONS_KEPT,
    Asked,
    CommitMachine,
    Decided,
    Effect,
    Event,
    Opened,
    RankLost,
    RankMissed,
    StepDecided,
    Voted,
    VoteRefused,
    Withdrawn,
)
from tests.manager.builders import refused


def yes(call: int, rank: int, step: int = 5, quorum_id: int | None = None) -> Voted:
    return Voted(call, rank, step, True, quorum_id)


def no(call: int, rank: int, step: int = 5, quorum_id: int | None = None) -> Voted:
    return Voted(call, rank, step, False, quorum_id)


def opened(size: int = 2, quorum_id: int = 1, step: int = 5) -> CommitMachine:
    machine = CommitMachine(size)
    assert machine.handle(Opened(quorum_id, step)) == []
    return machine


def answers(machine: CommitMachine, event: Event) -> list[Effect]:
    """To the calls."""
    return [effect for effect in machine.handle(event) if not isinstance(effect, StepDecided)]


class TestDecision:
    def test_commits_when_every_rank_has_voted_yes(self):
        m = opened(3)
        assert answers(m, yes(1, 2)) == []
        assert answers(m, yes(2, 0)) == []
        assert m.is_voting
        assert answers(m, yes(3, 1)) == [Decided(1, True), Decided(2, True), Decided(3, True)]
        assert (m.commits, m.discards, m.is_voting) == (1, 0, False)

    def test_one_no_discards_at_once(self):
        m = opened(3)
        m.handle(yes(1, 0))
        assert answers(m, no(2, 1)) == [Decided(1, False), Decided(2, False)]
        assert (m.commits, m.discards) == (0, 1)

    def test_a_late_voter_gets_the_discard_whatever_it_votes(self):
        m = opened(3)
        m.handle(no(1, 0))
        assert answers(m, yes(2, 1)) == [Decided(2, False)]
        assert answers(m, no(3, 2)) == [Decided(3, False)]
        assert m.discards == 1

    def test_a_repeated_voter_gets_the_commit_for_ever(self):
        m = opened(2)
        m.handle(yes(1, 0))
        m.handle(yes(2, 1))
        for call in range(3, 9):
            assert answers(m, yes(call, call % 2)) == [Decided(call, True)]
        assert m.commits == 1

    def test_who_says_no_is_never_told_to_commit(self):
        m = opened(2)
        m.handle(yes(1, 0))
        m.handle(yes(2, 1))
        assert answers(m, no(3, 0)) == [Decided(3, False)]
        m.handle(Opened(1, 6))
        assert answers(m, no(4, 0, step=5)) == [Decided(4, False)]
        assert answers(m, yes(5, 0, step=5)) == [Decided(5, True)]
        assert (m.commits, m.discards) == (1, 0)

    def test_of_an_earlier_step_is_still_known(self):
        m = opened(1, quorum_id=1, step=5)
        m.handle(yes(1, 0))
        m.handle(Opened(1, 6))
        assert answers(m, yes(2, 0, step=5)) == [Decided(2, True)]
        m.handle(Opened(2, 7))
        assert answers(m, yes(3, 0, step=5, quorum_id=1)) == [Decided(3, True)]

    def test_is_kept_for_the_last_sixteen(self):
        m = CommitMachine(1)
        for step in range(DECISIONS_KEPT + 1):
            m.handle(Opened(1, step))
            m.handle(yes(step, 0, step=step))
        assert answers(m, yes(100, 0, step=1, quorum_id=1)) == [Decided(100, True)]
        assert len(m._decided) == DECISIONS_KEPT


class TestCalls:
    """A vote that names no quorum lives as long as its call."""

    def test_who_withdraws_has_not_voted(self):
        m = opened(2)
        m.handle(yes(1, 0))
        assert answers(m, Withdrawn(1)) == []
        assert answers(m, yes(2, 1)) == []
        assert answers(m, yes(3, 0)) == [Decided(2, True), Decided(3, True)]

    def test_a_rank_twice_completes_nothing(self):
        m = opened(2)
        m.handle(yes(1, 0))
        assert answers(m, yes(2, 0)) == [refused(1, Superseded, "rank 0")]
        assert answers(m, Withdrawn(1)) == []
        assert answers(m, yes(3, 1)) == [Decided(2, True), Decided(3, True)]

    def test_a_rank_may_change_its_mind_while_it_waits(self):
        m = opened(2)
        m.handle(yes(1, 0))
        assert answers(m, no(2, 0)) == [refused(1, Superseded), Decided(2, False)]

    def test_an_unknown_call_is_nothing(self):
        assert opened().handle(Withdrawn(99)) == []

    @pytest.mark.parametrize("rank", [-1, 2, 7])
    def test_a_rank_out_of_range_is_refused_and_completes_nothing(self, rank: int):
        m = opened(2)
        m.handle(yes(1, 0))
        assert answers(m, yes(2, rank)) == [refused(2, InvalidRequest, "rank:", str(rank), "0 to 1")]
        assert answers(m, no(3, rank)) == [refused(3, InvalidRequest, "rank:")]
        assert answers(m, yes(4, 1)) == [Decided(1, True), Decided(4, True)]


class TestBoundVotes:
    """A yes that names its quorum: its rank repeats it until it has the decision, and asks for nothing else before."""

    def test_counts_after_its_call_has_ended(self):
        m = opened(2)
        m.handle(yes(1, 0, quorum_id=1))
        assert answers(m, Withdrawn(1)) == []
        assert m.is_voting
        assert Decided(2, True) in m.handle(yes(2, 1, quorum_id=1))
        assert answers(m, yes(3, 0, quorum_id=1)) == [Decided(3, True)]

    def test_repeated_it_counts_once(self):
        m = opened(3)
        m.handle(yes(1, 0, quorum_id=1))
        m.handle(Withdrawn(1))
        m.handle(yes(2, 0, quorum_id=1))
        assert answers(m, yes(3, 1, quorum_id=1)) == []
        assert Decided(4, True) in m.handle(yes(4, 2, quorum_id=1))

    def test_only_what_names_its_quorum_is_bound(self):
        m = opened(2)
        m.handle(yes(1, 0, quorum_id=1))
        m.handle(Withdrawn(1))
        m.handle(yes(2, 0))
        m.handle(Withdrawn(2))
        assert not m.is_voting

    def test_is_over_with_its_attempt(self):
        m = opened(2)
        m.handle(yes(1, 0, quorum_id=1))
        m.handle(Withdrawn(1))
        m.handle(Opened(2, 5))
        assert not m.is_voting
        assert answers(m, yes(2, 1, quorum_id=2)) == []

    @pytest.mark.parametrize("told", [1, 2])
    def test_a_discard_is_repeated_to_it_whoever_was_told(self, told: int):
        """Each (quorum_id, step) is tried once."""
        m = opened(2)
        m.handle(yes(1, 0, quorum_id=1))
        m.handle(no(2, 1, quorum_id=1))
        for call in range(3, 3 + told):
            assert answers(m, yes(call, 0, quorum_id=1)) == [Decided(call, False)]
        assert answers(m, yes(9, 1, quorum_id=1)) == [Decided(9, False)]


class TestAsks:
    """Under a manager that has restarted a bound yes waits for a mate that asks already: what it holds decides."""

    @pytest.mark.parametrize(
        ("step", "tag", "has_failed", "commit"),
        [
            (6, 1, False, True),
            (6, 2, False, False),
            (6, None, False, False),
            (7, 1, False, False),
            (4, 1, False, False),
        ],
    )
    def test_a_mate_holds_the_step_only_by_the_tag_of_its_own_quorum(
        self, step: int, tag: int | None, has_failed: bool, commit: bool
    ):
        """c06: step 6 of another quorum is not this attempt's commit."""
        m = CommitMachine(2)
        m.handle(yes(1, 0, quorum_id=1))
        assert answers(m, Asked(1, step, tag, has_failed)) == [Decided(1, commit)]

    def test_a_mate_that_asks_at_the_same_step_is_let_into_it_by_the_manager_that_opened_it(self):
        m = opened(2)
        m.handle(yes(1, 0, quorum_id=1))
        assert answers(m, Asked(1, 5, 0, has_failed=False)) == []
        assert answers(m, Asked(1, 5, 0, has_failed=True)) == [Decided(1, False)]

    @pytest.mark.parametrize("has_failed", [False, True])
    def test_and_is_not_bound_under_one_that_has_restarted(self, has_failed: bool):
        m = CommitMachine(2)
        m.handle(yes(1, 0, quorum_id=1))
        assert answers(m, Asked(1, 5, 0, has_failed)) == [Decided(1, False)]

    @pytest.mark.parametrize("asked", [Asked(1, 6, 2, False), Asked(1, 6, None, True), Asked(1, 3, 0, False)])
    def test_a_mate_that_holds_nothing_of_it_does_not_speak_for_the_third(self, asked: Asked):
        """It may be a new process; the third may have been told to commit."""
        m = CommitMachine(3)
        m.handle(yes(1, 0, quorum_id=1))
        assert answers(m, asked) == []
        assert answers(m, Asked(2, 6, 1, False)) == [Decided(1, True)]

    def test_but_with_the_third_that_repeats_its_yes_all_is_said(self):
        m = CommitMachine(3)
        m.handle(yes(1, 0, quorum_id=1))
        m.handle(Asked(1, 3, 0, False))
        assert answers(m, yes(2, 2, quorum_id=1)) == [Decided(1, False), Decided(2, False)]

    def test_nor_does_a_no_that_names_no_quorum(self):
        m = CommitMachine(3)
        m.handle(yes(1, 0, quorum_id=1))
        assert answers(m, no(2, 1)) == [Decided(2, False)]
        assert answers(m, Asked(2, 6, 1, False)) == [Decided(1, True)]

    def test_a_no_that_names_no_quorum_hinders_no_bound_yes(self):
        m = CommitMachine(2)
        m.handle(no(1, 1))
        assert answers(m, yes(2, 0, quorum_id=1)) == []
        assert answers(m, Asked(1, 5, 0, False)) == [Decided(2, False)]

    @pytest.mark.parametrize("vote", [True, False])
    def test_a_vote_for_the_next_step_of_the_quorum_tells_that_this_one_was_committed(self, vote: bool):
        m = CommitMachine(2)
        m.handle(yes(1, 0, quorum_id=1))
        later = [] if vote else [Decided(2, False)]
        assert answers(m, Voted(2, 1, 6, vote, 1)) == [Decided(1, True), *later]

    def test_in_the_other_order_too(self):
        m = CommitMachine(2)
        m.handle(yes(1, 0, step=6, quorum_id=1))
        assert answers(m, yes(2, 1, quorum_id=1)) == [Decided(2, True)]
        assert answers(m, Asked(1, 6, 1, False)) == [Decided(1, False)]


class TestWitnesses:
    """A rank that is lost may have been told of a decision by the manager of before."""

    def test_its_end_decides_nothing_and_its_mates_are_refused_once_it_is_not_back(self):
        m = CommitMachine(2)
        m.handle(yes(1, 0, quorum_id=1))
        assert answers(m, RankLost(1)) == []
        assert answers(m, RankMissed(1, "rank 1 has ended")) == [
            refused(1, Unrecoverable, "step 5 of quorum 1", "has started since", "rank 1 has ended")
        ]

    def test_one_that_has_repeated_its_yes_knows_nothing(self):
        m = CommitMachine(3)
        m.handle(yes(1, 0, quorum_id=1))
        m.handle(yes(2, 1, quorum_id=1))
        assert answers(m, RankMissed(1, "rank 1 has ended")) == []
        assert answers(m, yes(3, 2, quorum_id=1)) == [Decided(1, True), Decided(2, True), Decided(3, True)]

    def test_what_was_opened_here_was_decided_by_none_before(self):
        m = opened(2)
        m.handle(yes(1, 0, quorum_id=1))
        assert answers(m, RankLost(1)) == [Decided(1, False)]


class TestLostRanks:
    def test_what_a_lost_rank_has_not_voted_for_is_discarded(self):
        m = opened(3)
        m.handle(yes(1, 0))
        assert answers(m, RankLost(2)) == [Decided(1, False)]
        assert answers(m, yes(2, 1)) == [Decided(2, False)]

    def test_before_any_vote_too(self):
        m = opened(2)
        assert answers(m, RankLost(1)) == []
        assert answers(m, yes(1, 0)) == [Decided(1, False)]

    def test_a_yes_that_it_gave_counts(self):
        m = opened(2)
        m.handle(yes(1, 0))
        assert answers(m, RankLost(0)) == []
        assert answers(m, yes(2, 1)) == [Decided(1, True), Decided(2, True)]

    def test_a_decision_stands(self):
        m = opened(2)
        m.handle(yes(1, 0))
        m.handle(yes(2, 1))
        assert answers(m, RankLost(1)) == []
        assert answers(m, yes(3, 0)) == [Decided(3, True)]

    def test_without_an_attempt_nothing_is_lost(self):
        assert CommitMachine(2).handle(RankLost(1)) == []


class TestSteps:
    @pytest.mark.parametrize("step", [4, 6])
    def test_another_step_than_the_one_in_flight_is_refused_with_both_numbers(self, step: int):
        m = opened(2)
        m.handle(yes(1, 0))
        assert answers(m, yes(2, 1, step=step)) == [refused(2, WrongState, "step:", str(step), "5")]
        assert answers(m, yes(3, 1)) == [Decided(1, True), Decided(3, True)]

    def test_another_quorum_than_the_one_in_force_is_refused_with_both_ids(self):
        m = opened(2, quorum_id=3)
        assert answers(m, yes(1, 0, quorum_id=2)) == [refused(1, WrongState, "quorum_id:", "2", "3")]
        assert answers(m, yes(2, 0, quorum_id=3)) == []

    def test_a_negative_step_is_refused(self):
        assert opened().handle(yes(1, 0, step=-1)) == [refused(1, InvalidRequest, "step:", "-1")]

    def test_callers_of_the_bare_rpc_open_an_attempt_by_their_first_vote(self):
        m = CommitMachine(2)
        for step in (0, 1, 2):
            assert answers(m, yes(2 * step, 0, step=step)) == []
            assert answers(m, yes(2 * step + 1, 1, step=step)) == [Decided(2 * step, True), Decided(2 * step + 1, True)]

    def test_a_vote_that_was_withdrawn_does_not_hold_the_step(self):
        """torchft's defect 1, on the bare RPC: rank 0 votes for step 1 and times out, rank 1 votes for step 2."""
        m = CommitMachine(2)
        m.handle(yes(1, 0, step=1))
        m.handle(Withdrawn(1))
        assert answers(m, yes(2, 1, step=2)) == []
        assert answers(m, yes(3, 0, step=2)) == [Decided(2, True), Decided(3, True)]


class TestNextAttempt:
    def test_a_discard_does_not_stick_to_the_retry(self):
        m = opened(2)
        m.handle(no(1, 0))
        assert answers(m, Opened(1, 5)) == []
        assert answers(m, yes(2, 0)) == []
        assert answers(m, yes(3, 1)) == [Decided(2, True), Decided(3, True)]

    def test_nor_does_a_commit(self):
        """All ranks came back to step 5, say from a checkpoint: the step is tried again, whoever comes late to it."""
        m = opened(2)
        m.handle(yes(1, 0))
        assert answers(m, yes(2, 1)) == [Decided(1, True), Decided(2, True)]
        m.handle(Opened(1, 5))
        m.handle(yes(3, 0))
        assert answers(m, Opened(1, 6)) == [refused(3, WrongState, "given up")]
        assert answers(m, yes(4, 1, step=5)) == [refused(4, WrongState, "5", "6")]

    def test_nor_under_a_new_quorum(self):
        m = opened(2)
        m.handle(no(1, 0))
        m.handle(Opened(2, 5))
        assert answers(m, yes(2, 0)) == []
        assert answers(m, yes(3, 1)) == [Decided(2, True), Decided(3, True)]

    def test_without_a_quorum_between_it_begins_once_all_were_told(self):
        m = opened(2)
        m.handle(yes(1, 0))
        m.handle(no(2, 1))
        assert answers(m, yes(3, 0)) == []
        assert answers(m, yes(4, 1)) == [Decided(3, True), Decided(4, True)]

    def test_and_not_before(self):
        m = opened(3)
        m.handle(yes(1, 0))
        m.handle(no(2, 1))
        assert answers(m, yes(3, 0)) == [Decided(3, False)]
        assert answers(m, yes(4, 2)) == [Decided(4, False)]

    def test_who_waits_in_an_attempt_that_is_given_up_learns_so(self):
        m = opened(2)
        m.handle(yes(1, 0))
        assert answers(m, Opened(2, 5)) == [refused(1, WrongState, "5", "given up")]
        assert answers(m, yes(2, 1)) == []
        assert answers(m, yes(3, 0)) == [Decided(2, True), Decided(3, True)]


# -- drawn events

SIZE = 2
events = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 1), st.integers(0, 1)),
        st.tuples(
            st.just("vote"),
            st.integers(-1, SIZE),
            st.integers(-1, 1),
            st.sampled_from([True, True, True, False]),
            st.sampled_from([None, None, 0, -1]),
        ),
        st.tuples(st.just("vote"), st.integers(0, SIZE - 1), st.just(0), st.just(True), st.just(None)),
        st.tuples(st.just("withdraw"), st.integers(0, SIZE - 1)),
    ),
    max_size=60,
)


@dataclass(frozen=True)
class Cast:
    """A vote that counts: its call is open, or it is bound. (quorum_id, step) is what it is for."""

    key: tuple[int, int]
    rank: int
    vote: bool
    is_bound: bool = False


class Witness:
    """Knows the votes that count and what was decided, and judges every decision by them."""

    def __init__(self) -> None:
        self.machine = CommitMachine(SIZE)
        self.quorum_id, self.step = 1, 5
        self.open: dict[int, Cast] = {}
        self.decisions: dict[tuple[int, int], bool] = {}
        self.told: dict[tuple[int, int], set[int]] = {}
        self.feed(Opened(1, 5))

    def feed(self, event: Event) -> None:
        effects = list(self.machine.handle(event))
        decided: dict[int, bool] = {}
        for effect in effects:
            match effect:
                case Decided(call, commit):
                    decided[call] = commit
                case VoteRefused(call):
                    assert call in self.open
                    del self.open[call]
        if decided:
            assert isinstance(event, Voted)
            self._check(self.open[event.call], decided)
        for call in decided:
            del self.open[call]
        assert self.machine.is_voting == bool(self.open)

    def _check(self, last: Cast, decided: dict[int, bool]) -> None:
        commits = set(decided.values())
        assert len(commits) == 1, "everyone gets the same decision"
        commit = commits.pop()
        waiting = [self.open[call] for call in decided]
        assert {cast.key for cast in waiting} == {last.key}
        known = self.decisions.get(last.key)
        is_next_try = commit and not known and len(self.told.get(last.key, ())) == SIZE and not last.is_bound
        if known is None or is_next_try:
            self._check_first(last, waiting, commit)  # the next try is made where all were told of a discard
            self.told[last.key] = set()
        else:
            assert commit == (known and last.vote), "a late or repeated voter gets the decision that was made"
            commit = known
        self.decisions[last.key] = commit
        self.told[last.key] |= {cast.rank for cast in waiting}

    def _check_first(self, last: Cast, waiting: list[Cast], commit: bool) -> None:
        if commit:
            assert sorted(cast.rank for cast in waiting) == list(range(SIZE)), "every rank"
            assert all(cast.vote for cast in waiting)
        else:
            assert not last.vote, "only a no discards"
            assert len(self.open) == len(waiting), "and everybody who waits hears it"

    def ends(self, rank: int) -> None:
        """The newest call of that rank. What is bound goes on to count."""
        gone = max((call for call, cast in self.open.items() if cast.rank == rank), default=10_000)
        if gone in self.open and not self.open[gone].is_bound:
            del self.open[gone]
        self.feed(Withdrawn(gone))

    def opens(self, quorum_id: int, step: int) -> None:
        self.quorum_id, self.step = quorum_id, step
        self.decisions.pop((quorum_id, step), None)
        self.feed(Opened(quorum_id, step))
        assert not self.open, "who waited in the attempt that is given up has learnt so"


def run(drawn: list[tuple], witness: Witness) -> None:
    for call, (what, *details) in enumerate(drawn, start=1):
        match what:
            case "open":
                witness.opens(witness.quorum_id + details[0], witness.step + details[1])
            case "vote":
                rank, ahead, vote, older = details
                quorum_id = None if older is None else witness.quorum_id + older
                step = witness.step + ahead
                key = (witness.quorum_id if quorum_id is None else quorum_id, step)
                witness.open[call] = Cast(key, rank, vote, vote and quorum_id is not None)
                witness.feed(Voted(call, rank, step, vote, quorum_id))
            case "withdraw":
                witness.ends(details[0])


@settings(max_examples=300, deadline=None)
@given(events)
def test_a_commit_is_what_every_rank_wants(drawn: list[tuple]):
    run(drawn, Witness())


def keeps_the_votes_of_ended_calls(self: CommitMachine, call: int) -> None:
    pass


def forgets_bound_votes(self: CommitMachine, call: int) -> None:
    if self._attempt is not None:
        self._attempt.yes = {rank: other for rank, other in self._attempt.yes.items() if other != call}


def commits_by_all_but_one(self: CommitMachine, attempt, voted: Voted) -> list[Effect]:
    attempt.yes[voted.group_rank] = voted.call
    if not voted.vote:
        return self._decide(attempt, False)
    return self._decide(attempt, True) if len(attempt.yes) >= self._size - 1 else []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_withdraw", keeps_the_votes_of_ended_calls),
        ("_withdraw", forgets_bound_votes),
        ("_count", commits_by_all_but_one),
    ],
)
def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, wrong: object):
    @settings(max_examples=2000, deadline=None, database=None, derandomize=True, report_multiple_bugs=False)
    @given(events)
    def hunt(drawn: list[tuple]):
        run(drawn, Witness())

    monkeypatch.setattr(CommitMachine, name, wrong)
    with pytest.raises((AssertionError, KeyError)):
        hunt()
