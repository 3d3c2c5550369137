"""The StepMachine: every transition, whole stories, and what holds in all of them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent_client.agent.rules.step import HISTORY_KEPT, InvalidTransition, Phase, StepMachine
from lighthouse_protocol.messages.membership import Assignment, Distrust, DistrustKind

TRAINING = Assignment(
    quorum_id=7,
    replica_rank=0,
    replica_world_size=3,
    replica_ids=("a", "b", "c"),
    store_address="127.0.0.1:1",
    max_step=4,
    max_rank=0,
    max_world_size=2,
    contributors=2,
    primary_address="http://127.0.0.1:2",
    place=0,
)
HEALING = dataclasses.replace(
    TRAINING,
    max_rank=None,
    place=None,
    healing=(0,),
    heal_from_rank=1,
    heal_from_address="http://127.0.0.1:3",
    max_step=9,
)


@dataclass(frozen=True)
class Transition:
    act: Callable[[StepMachine], object]
    expected: Phase
    to: Phase


TRANSITIONS = {
    "ask": Transition(lambda m: m.ask(), Phase.IDLE, Phase.ASKED),
    "answered": Transition(lambda m: m.answered(TRAINING), Phase.ASKED, Phase.COMPUTING),
    "unanswered": Transition(lambda m: m.unanswered("nobody answers"), Phase.ASKED, Phase.COMPUTING),
    "vote": Transition(lambda m: m.vote(), Phase.COMPUTING, Phase.VOTED),
    "commit": Transition(lambda m: m.decided(True), Phase.VOTED, Phase.IDLE),
    "discard": Transition(lambda m: m.decided(False), Phase.VOTED, Phase.IDLE),
}
WAY_TO = {
    Phase.IDLE: [],
    Phase.ASKED: ["ask"],
    Phase.COMPUTING: ["ask", "answered"],
    Phase.VOTED: ["ask", "answered", "vote"],
}


def machine_in(phase: Phase) -> StepMachine:
    machine = StepMachine()
    for name in WAY_TO[phase]:
        TRANSITIONS[name].act(machine)
    assert machine.phase is phase
    return machine


def computing(assignment: Assignment = TRAINING, **fields: int) -> StepMachine:
    machine = StepMachine(**fields)  # type: ignore[arg-type]
    machine.ask()
    machine.answered(assignment)
    return machine


def visible(machine: StepMachine) -> dict[str, object]:
    fields = [field.name for field in dataclasses.fields(StepMachine) if field.name != "_history"]
    return {name: getattr(machine, name) for name in fields}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("name", TRANSITIONS)
def test_the_transition_table(name: str, phase: Phase) -> None:
    machine, transition = machine_in(phase), TRANSITIONS[name]
    if phase is transition.expected:
        transition.act(machine)
        assert machine.phase is transition.to
        return
    before = visible(machine)
    with pytest.raises(InvalidTransition) as raised:
        transition.act(machine)
    assert str(raised.value).startswith(f"{name} in phase {phase}, not {transition.expected}; so far: ")
    assert visible(machine) == before, "an impossible transition changes nothing"


def test_an_impossible_transition_tells_the_story_that_led_to_it() -> None:
    machine = computing()
    machine.reduced()
    machine.vote()
    machine.decided(True)
    machine.ask()
    with pytest.raises(InvalidTransition, match=r"so far: ask@0 answered@0 vote@0 commit@0 ask@1 vote@1$"):
        machine.vote()


def test_the_history_is_bounded() -> None:
    machine = StepMachine()
    for _ in range(3 * HISTORY_KEPT):
        machine.ask()
        machine.unanswered("nobody")
        machine.vote()
        machine.decided(False)
    with pytest.raises(InvalidTransition) as raised:
        machine.vote()
    assert len(str(raised.value).partition("so far: ")[2].split()) == HISTORY_KEPT


# -- stories


def test_a_step_that_commits() -> None:
    machine = computing(step=4, tag_quorum_id=3, batches_committed=10)
    assert machine.contributes
    machine.reduced()
    assert machine.vote() is True
    machine.decided(True)
    assert (machine.step, machine.tag_quorum_id, machine.batches_committed) == (5, 7, 12)
    assert machine.failure is None
    assert machine.discards == 0


def test_a_step_that_another_rank_discards_stays_where_it_was() -> None:
    machine = computing(step=4, tag_quorum_id=3, batches_committed=10)
    machine.reduced()
    assert machine.vote() is True
    machine.decided(False)
    assert (machine.step, machine.tag_quorum_id, machine.batches_committed) == (4, 3, 10)
    assert machine.discards == 1


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_only_a_yes_of_a_rank_that_is_alone_is_the_decision(is_alone: bool, fails: bool) -> None:
    machine = computing(is_alone=is_alone)
    machine.reduced()
    if fails:
        machine.failed("the peer is gone")
    assert not machine.has_decided, "before it has voted"
    machine.vote()
    assert machine.has_decided is (is_alone and not fails)
    machine.decided(not fails)
    assert not machine.has_decided


def test_a_failure_makes_the_vote_a_no_and_its_first_reason_stays() -> None:
    machine = computing()
    machine.reduced()
    machine.failed("the peer is gone")
    machine.failed("and so is the other")
    assert not machine.contributes
    assert machine.vote() is False
    assert machine.failure == "the peer is gone"


def test_without_a_collective_over_all_participants_nothing_commits() -> None:
    machine = computing()
    assert machine.vote() is False
    assert machine.failure == "no collective over all participants completed"


def test_without_a_quorum_nothing_commits_and_it_counts_as_no_discard() -> None:
    machine = StepMachine(step=3, tag_quorum_id=2)
    machine.ask()
    machine.unanswered("the lighthouse is away")
    machine.reduced()
    assert not machine.contributes
    assert machine.vote() is False
    machine.decided(False)
    assert (machine.step, machine.tag_quorum_id, machine.discards) == (3, 2, 0)
    assert machine.failure == "the lighthouse is away"


def test_a_healed_rank_takes_the_step_the_tag_and_the_count_of_its_peer() -> None:
    machine = computing(HEALING)
    assert machine.must_install
    assert not machine.contributes
    machine.reduced()
    machine.installing()
    assert machine.tag_quorum_id is None
    machine.installed(9, 6, 40)
    assert (machine.step, machine.tag_quorum_id, machine.batches_committed) == (9, 6, 40)
    assert machine.vote() is True
    machine.decided(True)
    assert (machine.step, machine.tag_quorum_id, machine.batches_committed) == (10, 7, 42)


def test_a_state_that_was_not_installed_does_not_commit() -> None:
    machine = computing(HEALING)
    machine.reduced()
    assert machine.vote() is False
    assert machine.failure == "this group holds another state than its peers; it heals before its next step"


def test_an_interrupted_installation_leaves_a_rank_without_a_tag_until_it_has_healed() -> None:
    machine = computing(HEALING, step=4, tag_quorum_id=3)
    machine.reduced()
    machine.installing()
    machine.failed("broke off")
    assert machine.vote() is False
    machine.decided(False)
    assert (machine.step, machine.tag_quorum_id) == (4, None)
    machine.ask()
    machine.answered(HEALING)
    machine.reduced()
    machine.installing()
    machine.installed(9, 6, 40)
    assert machine.vote() is True


def test_a_torn_state_does_not_vote_yes_under_a_quorum_in_which_it_does_not_heal() -> None:
    """t04: nothing has failed in this step, and there is nothing to install; the state itself is not whole."""
    machine = computing(HEALING, step=4, tag_quorum_id=3)
    machine.installing()
    machine.failed("broke off")
    machine.vote()
    machine.decided(False)
    machine.ask()
    machine.answered(dataclasses.replace(HEALING, heal_from_rank=None, max_rank=0, place=0))
    machine.reduced()
    assert not machine.must_install
    assert machine.vote() is False
    assert machine.failure == "the state of a peer was installed in part"


def test_discards_count_up_to_the_next_commit() -> None:
    machine = StepMachine()
    for expected in (1, 2, 3):
        machine.ask()
        machine.answered(TRAINING)
        machine.failed("again")
        machine.vote()
        machine.decided(False)
        assert machine.discards == expected
    machine.ask()
    machine.answered(TRAINING)
    machine.reduced()
    machine.vote()
    machine.decided(True)
    assert machine.discards == 0


def test_what_another_group_is_to_blame_for_is_told_apart() -> None:
    machine = StepMachine()
    for is_blamed in (True, False, True):
        machine.ask()
        machine.answered(TRAINING)
        machine.failed("first", is_blamed=is_blamed)
        machine.failed("later", is_blamed=not is_blamed)
        assert (machine.failure, machine.is_blamed) == ("first", is_blamed)
        machine.vote()
        machine.decided(False)
        if not machine.is_blamed:
            machine.faulted()
    assert (machine.discards, machine.faults) == (3, 1)
    machine.ask()
    machine.answered(TRAINING)
    assert not machine.is_blamed
    machine.reduced()
    machine.vote()
    machine.decided(True)
    assert (machine.discards, machine.faults) == (0, 0)


def begun(assignment: Assignment = TRAINING) -> StepMachine:
    """In its first try of a step; the state is that of step 4, committed under quorum 3."""
    machine = StepMachine(step=4, tag_quorum_id=3)
    machine.begin()
    machine.ask()
    machine.answered(assignment)
    return machine


def test_the_gradients_of_a_discarded_step_are_reduced_again() -> None:
    machine = begun()
    machine.failed("a peer is gone")
    machine.vote()
    machine.decided(False)
    assert machine.is_salvageable


def test_what_the_script_calls_wrong_is_not_reduced_again() -> None:
    machine = begun()
    machine.erred("the loss is not finite")
    machine.vote()
    machine.decided(False)
    assert not machine.is_salvageable


def test_a_backward_pass_that_was_given_up_is_not_reduced_again() -> None:
    machine = begun()
    machine.gives_up()
    assert not machine.is_salvageable


def test_gradients_of_another_state_are_not_reduced_again() -> None:
    """At another step, or at the same one of another quorum, which need not hold the same bits."""
    machine = begun(HEALING)
    machine.failed("a peer is gone")
    machine.vote()
    machine.decided(False)
    assert not machine.is_salvageable, "it is still to install the state of its peer"
    for step, tag in ((9, 3), (4, 6)):
        machine.installed(step, tag, 40)
        assert not machine.is_salvageable
    machine.begin()
    assert machine.is_salvageable


def test_a_new_step_forgets_the_failure_and_the_reductions_of_the_last() -> None:
    machine = computing(HEALING)
    machine.reduced()
    machine.failed("once")
    machine.vote()
    machine.decided(False)
    machine.ask()
    assert (machine.assignment, machine.failure, machine.has_reduced, machine.must_install) == (None,) * 2 + (
        False,
    ) * 2


# -- healing before it computes


def test_what_may_have_to_heal_waits_for_its_quorum() -> None:
    machine = StepMachine()
    assert machine.may_heal, "it has committed nothing here"
    for commit in (True, False, True):
        machine.ask()
        machine.answered(TRAINING)
        machine.reduced()
        machine.vote()
        machine.decided(commit)
        assert machine.may_heal is not commit
    machine.installed(9, 7, 3)
    assert machine.may_heal, "what it holds, a file or a peer has told"


def test_one_that_counts_when_it_has_healed_contributes_then_and_not_before() -> None:
    machine = StepMachine()
    machine.ask(heals_first=True)
    machine.answered(dataclasses.replace(HEALING, place=1))
    assert not machine.contributes
    machine.installing()
    machine.installed(9, 7, 3)
    assert machine.contributes
    machine.reduced()
    assert machine.vote()


@pytest.mark.parametrize("assignment", [HEALING, dataclasses.replace(TRAINING, max_rank=None, place=None)])
def test_one_that_is_told_too_late_adds_zeros_and_votes_no(assignment: Assignment) -> None:
    """Whether it is dealt a source, or none."""
    machine = StepMachine()
    machine.begin()
    machine.ask()
    machine.answered(assignment)
    assert not machine.contributes
    machine.reduced()
    assert not machine.vote()
    machine.decided(False)
    assert machine.may_heal
    assert not machine.is_salvageable, "its gradients are of a state that does not count"


# -- what holds in every story


assignments = st.builds(
    lambda quorum_id, contributors, heals, max_step: dataclasses.replace(
        HEALING if heals else TRAINING, quorum_id=quorum_id, contributors=contributors, max_step=max_step
    ),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 20),
)


class Stories(RuleBasedStateMachine):
    """Anything the Agent may do, in any order that the phases allow; a commit only follows a yes of this rank."""

    @initialize(step=st.integers(0, 10), tag=st.integers(0, 5))
    def begin(self, step: int, tag: int) -> None:
        self.machine = StepMachine(step=step, tag_quorum_id=tag)
        self.position = (step, 0)
        self.is_installing = False
        self.has_quorum = self.has_reduced = self.has_failed = self.has_installed = self.said_yes = False

    def in_phase(self, phase: Phase) -> bool:
        return self.machine.phase is phase

    @precondition(lambda self: self.in_phase(Phase.IDLE))
    @rule()
    def ask(self) -> None:
        self.machine.ask()
        self.has_quorum = self.has_reduced = self.has_failed = self.has_installed = False

    @precondition(lambda self: self.in_phase(Phase.ASKED))
    @rule(assignment=assignments)
    def answered(self, assignment: Assignment) -> None:
        self.machine.answered(assignment)
        self.has_quorum = True

    @precondition(lambda self: self.in_phase(Phase.ASKED))
    @rule()
    def unanswered(self) -> None:
        self.machine.unanswered("nobody")
        self.has_failed = True

    @precondition(lambda self: self.in_phase(Phase.COMPUTING))
    @rule()
    def reduced(self) -> None:
        self.machine.reduced()
        self.has_reduced = True

    @precondition(lambda self: not self.in_phase(Phase.IDLE))
    @rule()
    def failed(self) -> None:
        self.machine.failed("a fault")
        self.has_failed = True

    @precondition(lambda self: self.in_phase(Phase.COMPUTING) and self.machine.must_install)
    @rule(is_interrupted=st.booleans(), quorum_id=st.integers(0, 9))
    def install(self, is_interrupted: bool, quorum_id: int) -> None:
        assert self.machine.assignment is not None
        step = self.machine.assignment.max_step
        self.machine.installing()
        self.is_installing = True
        self.check_tag()
        if is_interrupted:
            self.machine.failed("broke off")
            self.has_failed = True
            return
        self.machine.installed(step, quorum_id, 3)
        self.position = (step, 3)
        self.is_installing, self.has_installed = False, True

    @precondition(lambda self: self.in_phase(Phase.COMPUTING))
    @rule()
    def vote(self) -> None:
        self.said_yes = self.machine.vote()
        if self.said_yes:
            assert self.has_quorum
            assert self.has_reduced
            assert not self.has_failed
            assert self.has_installed or not self.machine.assignment.heals  # type: ignore[union-attr]
            assert not self.is_installing
        else:
            assert self.machine.failure

    @precondition(lambda self: self.in_phase(Phase.VOTED))
    @rule(commit=st.booleans())
    def decided(self, commit: bool) -> None:
        commit = commit and self.said_yes
        assignment = self.machine.assignment
        self.machine.decided(commit)
        if commit:
            assert assignment is not None
            assert self.machine.tag_quorum_id == assignment.quorum_id
            step, batches = self.position
            self.position = (step + 1, batches + assignment.contributors)

    @invariant()
    def check_tag(self) -> None:
        """A rank is without a tag from the first byte of an installation to its last."""
        if hasattr(self, "machine"):
            assert (self.machine.tag_quorum_id is None) == self.is_installing

    @invariant()
    def check_position(self) -> None:
        """The step moves by a commit or by an installation, and so does the count of batches."""
        if hasattr(self, "machine"):
            assert (self.machine.step, self.machine.batches_committed) == self.position


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestStories = Stories.TestCase
TestStories.settings = unhurried


@unhurried
@given(st.lists(st.sampled_from([*TRANSITIONS, "failed", "reduced"]), max_size=30))
def test_in_any_order_at_all_it_moves_as_the_table_says_or_raises(names: list[str]) -> None:
    machine = StepMachine()
    for name in names:
        before = visible(machine)
        if name == "failed":
            machine.failed("a fault")
        elif name == "reduced":
            machine.reduced()
        elif machine.phase is TRANSITIONS[name].expected:
            TRANSITIONS[name].act(machine)
            assert machine.phase is TRANSITIONS[name].to
        else:
            with pytest.raises(InvalidTransition):
                TRANSITIONS[name].act(machine)
            assert visible(machine) == before
        assert machine.step == before["step"] or name == "commit"


def test_a_torn_state_has_no_tag_until_it_has_healed_and_says_why() -> None:
    machine = StepMachine(step=5, tag_quorum_id=3, is_alone=True)
    machine.tear(DistrustKind.NOT_APPLIED, "first")
    machine.tear(DistrustKind.DIVERGENCE, "second")
    assert (machine.tag.quorum_id, machine.is_torn, machine.is_installing) == (None, True, False)
    assert machine.distrust == Distrust(DistrustKind.NOT_APPLIED, "first")
    machine.ask()
    machine.answered(HEALING)
    assert not machine.cannot_heal
    machine.reduced()
    machine.installing()
    machine.installed(9, 6, 40)
    assert (machine.distrust, machine.is_torn) == (None, False)
    assert machine.vote() is True


def test_a_torn_state_never_commits() -> None:
    machine = StepMachine(step=5, tag_quorum_id=3)
    machine.tear(DistrustKind.NOT_APPLIED, "it broke")
    machine.ask()
    machine.answered(TRAINING)
    machine.reduced()
    assert machine.cannot_heal
    assert machine.vote() is False
    assert "it broke" in (machine.failure or "")


def test_a_torn_state_that_is_told_too_late_heals_in_the_next_step() -> None:
    """Another rank of its group had begun to compute. There is a peer that can heal it."""
    machine = StepMachine(step=5, tag_quorum_id=3)
    machine.tear(DistrustKind.NOT_APPLIED, "it broke")
    machine.ask(heals_first=True)
    machine.answered(dataclasses.replace(TRAINING, max_rank=None, place=None))
    assert (machine.is_unhealed, machine.cannot_heal, machine.contributes) == (False, False, False)
    machine.reduced()
    assert machine.vote() is False
    machine.decided(False)
    assert machine.may_heal


@pytest.mark.parametrize("is_alone", [True, False])
def test_where_there_are_other_ranks_the_step_that_they_are_in_is_done_first(is_alone: bool) -> None:
    machine = StepMachine(is_alone=is_alone)
    machine.ask()
    machine.answered(TRAINING)
    machine.reduced()
    machine.vote()
    machine.decided(True)
    machine.tear(DistrustKind.NOT_APPLIED, "it broke")
    assert machine.discards == is_alone, "it asks for another quorum, or does the step and votes no"
    machine.ask()
    machine.answered(TRAINING)
    assert (machine.is_unhealed, machine.cannot_heal) == (True, False)
