"""The StepMachine: every transition, whole stories, and what holds in all of them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent_client.step.rules.machine import HISTORY_KEPT, InvalidTransition, Phase, StepMachine
from lighthouse_protocol.messages.membership import Assignment, Distrust, DistrustKind
from tests.agent_client.assignments import assignment

TRAINING = assignment(0, 3, max_step=4, max_world_size=2, contributors=2)
HEALS_NEXT = dataclasses.replace(TRAINING, max_rank=None, place=None)
"""It is behind, and no source is dealt to it."""
HEALING = dataclasses.replace(HEALS_NEXT, healing=(0,), heal_from_rank=1, heal_from_address="b:1", max_step=9)


@dataclass(frozen=True)
class Transition:
    act: Callable[[StepMachine], object]
    expected: Phase
    to: Phase


TRANSITIONS = {
    "ask": Transition(lambda m: m.ask(), Phase.IDLE, Phase.ASKED),
    "accept_assignment": Transition(lambda m: m.accept_assignment(TRAINING), Phase.ASKED, Phase.COMPUTING),
    "no_quorum": Transition(lambda m: m.record_quorum_failure("nobody answers"), Phase.ASKED, Phase.COMPUTING),
    "vote": Transition(lambda m: m.vote(), Phase.COMPUTING, Phase.VOTED),
    "commit": Transition(lambda m: m.record_decision(True), Phase.VOTED, Phase.IDLE),
    "discard": Transition(lambda m: m.record_decision(False), Phase.VOTED, Phase.IDLE),
}
WAY_TO = {
    Phase.IDLE: [],
    Phase.ASKED: ["ask"],
    Phase.COMPUTING: ["ask", "accept_assignment"],
    Phase.VOTED: ["ask", "accept_assignment", "vote"],
}


def machine_in(phase: Phase) -> StepMachine:
    machine = StepMachine()
    for name in WAY_TO[phase]:
        TRANSITIONS[name].act(machine)
    assert machine.phase is phase
    return machine


def told(machine: StepMachine, assignment: Assignment = TRAINING) -> StepMachine:
    """In its next step, under that quorum."""
    machine.ask()
    machine.accept_assignment(assignment)
    return machine


def computing(assignment: Assignment = TRAINING, **fields: int) -> StepMachine:
    return told(StepMachine(**fields), assignment)  # type: ignore[arg-type]


def ended(machine: StepMachine, *, commit: bool) -> bool:
    """Its own vote."""
    vote = machine.vote()
    machine.record_decision(commit)
    return vote


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
    machine.record_reduction()
    ended(machine, commit=True)
    machine.ask()
    with pytest.raises(InvalidTransition, match=r"so far: ask@0 accept_assignment@0 vote@0 commit@0 ask@1 vote@1$"):
        machine.vote()


def test_the_history_is_bounded() -> None:
    machine = StepMachine()
    for _ in range(3 * HISTORY_KEPT):
        machine.ask()
        machine.record_quorum_failure("nobody")
        ended(machine, commit=False)
    with pytest.raises(InvalidTransition) as raised:
        machine.vote()
    assert len(str(raised.value).partition("so far: ")[2].split()) == HISTORY_KEPT


# -- stories


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_only_a_yes_of_a_rank_that_is_alone_is_the_decision(is_alone: bool, fails: bool) -> None:
    machine = computing(is_alone=is_alone)
    machine.record_reduction()
    if fails:
        machine.fail_step("the peer is gone")
    assert not machine.has_decided, "before it has voted"
    machine.vote()
    assert machine.has_decided is (is_alone and not fails)
    machine.record_decision(not fails)
    assert not machine.has_decided


@pytest.mark.parametrize(
    ("assignment", "reduces", "failure"),
    [
        (TRAINING, False, "no collective over all participants completed"),
        (HEALING, True, "this group holds another state than its peers; it heals before its next step"),
        (HEALS_NEXT, True, "this group holds another state than its peers; it heals before its next step"),
    ],
    ids=["no collective", "not installed", "no source dealt"],
)
def test_what_is_missing_for_a_yes_is_said_and_the_next_quorum_may_heal(
    assignment: Assignment, reduces: bool, failure: str
) -> None:
    machine = StepMachine()
    machine.begin()
    told(machine, assignment)
    assert machine.contributes is (assignment is TRAINING), "it adds zeros where it was told too late"
    if reduces:
        machine.record_reduction()
    assert ended(machine, commit=False) is False
    assert machine.failure == failure
    assert machine.may_heal
    assert machine.is_salvageable is (assignment is TRAINING), "gradients of a state that does not count are not"


def test_an_interrupted_installation_leaves_a_rank_without_a_tag_until_it_has_healed() -> None:
    """t04: under a quorum in which it does not heal nothing has failed, and there is nothing to install."""
    machine = computing(HEALING, step=4, tag_quorum_id=3)
    machine.record_reduction()
    machine.begin_install()
    machine.fail_step("broke off")
    assert ended(machine, commit=False) is False
    assert (machine.step, machine.tag_quorum_id) == (4, None)

    told(machine, dataclasses.replace(HEALING, heal_from_rank=None, max_rank=0, place=0)).record_reduction()
    assert not machine.must_install
    assert ended(machine, commit=False) is False
    assert machine.failure == "the state of a peer was installed in part"

    told(machine, HEALING).record_reduction()
    machine.begin_install()
    machine.finish_install(9, 6, 40)
    assert machine.vote() is True


@pytest.mark.parametrize(
    ("act", "is_salvageable"),
    [
        (lambda machine: machine.fail_step("a peer is gone"), True),
        (lambda machine: machine.record_error("the loss is not finite"), False),
        (lambda machine: machine.abandon_backward(), False),
    ],
    ids=["a peer is gone", "the script calls it wrong", "its backward pass was given up"],
)
def test_which_gradients_are_reduced_again(act: Callable[[StepMachine], None], is_salvageable: bool) -> None:
    machine = StepMachine(step=4, tag_quorum_id=3)
    machine.begin()
    told(machine)
    act(machine)
    ended(machine, commit=False)
    assert machine.is_salvageable is is_salvageable


def test_optimized_another_state_are_not_reduced_again() -> None:
    """At another step, or at the same one of another quorum, which need not hold the same bits."""
    machine = StepMachine(step=4, tag_quorum_id=3)
    machine.begin()
    told(machine, HEALING).fail_step("a peer is gone")
    ended(machine, commit=False)
    assert not machine.is_salvageable, "it is still to install the state of its peer"
    for step, tag in ((9, 3), (4, 6)):
        machine.finish_install(step, tag, 40)
        assert not machine.is_salvageable
    machine.begin()
    assert machine.is_salvageable


# -- healing before it computes


def test_a_commit_ends_a_row_of_discards() -> None:
    machine = computing()
    for _ in range(2):
        ended(machine, commit=False)
        machine.faults += 1
        told(machine)
    assert (machine.discards, machine.faults) == (2, 2)
    machine.record_reduction()
    ended(machine, commit=True)
    assert (machine.discards, machine.faults) == (0, 0)


def test_a_skipped_batch_counts_in_no_mean_and_is_behind_the_groups_all_the_same() -> None:
    """Two groups contribute, and one of them skips its batch: the next step begins with the third batch."""
    machine = computing(batches_committed=10)
    machine.skipped_weight = 1
    assert (machine.divisor, machine.batches) == (1, 2)
    machine.record_reduction()
    ended(machine, commit=True)
    assert machine.batches_committed == 12


def test_nothing_of_a_step_is_left_when_the_next_one_asks() -> None:
    machine = computing(HEALING)
    machine.record_compute()
    machine.record_reduction()
    machine.fail_step("b is lost", is_blamed=True)
    machine.abandon_backward()
    machine.is_in_backward = machine.skips_batch = True
    machine.skipped_weight = machine.reductions = 1
    ended(machine, commit=False)
    machine.ask()
    fresh = machine_in(Phase.ASKED)
    of_the_rank = {"discards", "ended", "moves"}
    assert {name: value for name, value in visible(machine).items() if name not in of_the_rank} == {
        name: value for name, value in visible(fresh).items() if name not in of_the_rank
    }


def test_what_may_have_to_heal_waits_for_its_quorum() -> None:
    machine = StepMachine()
    assert machine.may_heal, "it has committed nothing here"
    for commit in (True, False, True):
        told(machine).record_reduction()
        ended(machine, commit=commit)
        assert machine.may_heal is not commit
    machine.finish_install(9, 7, 3)
    assert machine.may_heal, "what it holds, a file or a peer has told"


# -- a state that is torn


def torn(**fields: int) -> StepMachine:
    machine = StepMachine(step=5, tag_quorum_id=3, **fields)  # type: ignore[arg-type]
    machine.tear(DistrustKind.NOT_APPLIED, "it broke")
    return machine


def test_a_torn_state_has_no_tag_until_it_has_healed_and_says_why() -> None:
    machine = torn(is_alone=True)
    machine.tear(DistrustKind.DIVERGENCE, "second")
    assert (machine.tag.quorum_id, machine.is_torn, machine.is_installing) == (None, True, False)
    assert machine.distrust == Distrust(DistrustKind.NOT_APPLIED, "it broke", step=5, quorum_id=3)
    told(machine, HEALING).record_reduction()
    assert not machine.has_no_heal_source
    machine.begin_install()
    machine.finish_install(9, 6, 40)
    assert (machine.distrust, machine.is_torn) == (None, False)
    assert machine.vote() is True


def test_what_was_committed_last_is_known_of_a_state_that_is_torn_again() -> None:
    """It catches up, and applies what the others apply."""
    machine = torn()
    machine.work_at(8, 4)
    machine.tear(DistrustKind.NOT_APPLIED, "it broke again")
    assert machine.distrust == Distrust(DistrustKind.NOT_APPLIED, "it broke", step=8, quorum_id=4)


def test_a_torn_state_never_commits() -> None:
    machine = told(torn())
    machine.record_reduction()
    assert machine.has_no_heal_source
    assert machine.vote() is False
    assert "it broke" in (machine.failure or "")


def test_a_torn_state_that_is_told_too_late_heals_in_the_next_step() -> None:
    """Another rank of its group had begun to compute. There is a peer that can heal it."""
    machine = torn()
    machine.ask(heals_first=True)
    machine.accept_assignment(HEALS_NEXT)
    assert (machine.is_unhealed, machine.has_no_heal_source, machine.contributes) == (False, False, False)
    machine.record_reduction()
    assert ended(machine, commit=False) is False
    assert machine.may_heal


@pytest.mark.parametrize("is_alone", [True, False])
def test_where_there_are_other_ranks_the_step_that_they_are_in_is_done_first(is_alone: bool) -> None:
    machine = computing(is_alone=is_alone)
    machine.record_reduction()
    ended(machine, commit=True)
    machine.tear(DistrustKind.NOT_APPLIED, "it broke")
    assert machine.discards == is_alone, "it asks for another quorum, or does the step and votes no"
    told(machine)
    assert (machine.is_unhealed, machine.has_no_heal_source) == (True, False)


# -- what holds in every story


assignments = st.builds(
    lambda quorum_id, contributors, heals, max_step, place: dataclasses.replace(
        HEALING if heals else TRAINING, quorum_id=quorum_id, contributors=contributors, max_step=max_step, place=place
    ),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 20),
    st.sampled_from([0, None]),
)


class Stories(RuleBasedStateMachine):
    """Anything the Agent may do, in any order that the phases allow; a commit only follows a yes of this rank."""

    @initialize(step=st.integers(0, 10), tag=st.integers(0, 5))
    def begin(self, step: int, tag: int) -> None:
        self.machine = StepMachine(step=step, tag_quorum_id=tag)
        self.position = (step, 0)
        self.is_installing = False
        self.quorum: Assignment | None = None
        self.has_reduced = self.has_installed = self.said_yes = False
        self.failure: str | None = None
        self.discards = self.faults = 0

    def in_phase(self, phase: Phase) -> bool:
        return self.machine.phase is phase

    @precondition(lambda self: self.in_phase(Phase.IDLE))
    @rule()
    def ask(self) -> None:
        self.machine.ask()
        self.quorum = self.failure = None
        self.has_reduced = self.has_installed = False

    @precondition(lambda self: self.in_phase(Phase.ASKED))
    @rule(assignment=assignments)
    def answered(self, assignment: Assignment) -> None:
        self.machine.accept_assignment(assignment)
        self.quorum = assignment

    @precondition(lambda self: self.in_phase(Phase.ASKED))
    @rule()
    def record_quorum_failure(self) -> None:
        self.machine.record_quorum_failure("nobody")
        self.failure = "nobody"

    @precondition(lambda self: self.in_phase(Phase.COMPUTING))
    @rule()
    def reduced(self) -> None:
        self.machine.record_reduction()
        self.has_reduced = True

    @precondition(lambda self: not self.in_phase(Phase.IDLE))
    @rule(reason=st.sampled_from(["a fault", "another"]), is_blamed=st.booleans())
    def failed(self, reason: str, is_blamed: bool) -> None:
        """The first reason stays, and who is to blame for it."""
        before = self.machine.is_blamed
        self.machine.fail_step(reason, is_blamed=is_blamed)
        assert self.machine.is_blamed is (is_blamed if self.failure is None else before)
        self.failure = self.failure or reason

    @precondition(lambda self: self.in_phase(Phase.COMPUTING) and self.machine.must_install)
    @rule(is_interrupted=st.booleans(), quorum_id=st.integers(0, 9))
    def install(self, is_interrupted: bool, quorum_id: int) -> None:
        assert self.machine.assignment is not None
        step = self.machine.assignment.max_step
        self.machine.begin_install()
        self.is_installing = True
        self.check_tag()
        if is_interrupted:
            self.machine.fail_step("broke off")
            self.failure = self.failure or "broke off"
            return
        self.machine.finish_install(step, quorum_id, 3)
        self.position = (step, 3)
        self.is_installing, self.has_installed = False, True

    @precondition(lambda self: self.in_phase(Phase.IDLE))
    @rule(assignment=assignments)
    def go_well(self, assignment: Assignment) -> None:
        """Up to the vote: without it, few stories come to a commit."""
        self.ask()
        self.answered(assignment)
        self.reduced()
        if self.machine.must_install:
            self.install(is_interrupted=False, quorum_id=assignment.quorum_id)

    @precondition(lambda self: self.in_phase(Phase.COMPUTING))
    @rule()
    def vote(self) -> None:
        self.said_yes = self.machine.vote()
        if self.said_yes:
            assert self.quorum is not None
            assert self.has_reduced
            assert self.failure is None
            assert self.has_installed or (not self.quorum.heals and self.quorum.place is not None)
            assert not self.is_installing
        else:
            assert self.machine.failure
            self.failure = self.failure or self.machine.failure

    @precondition(lambda self: self.in_phase(Phase.VOTED))
    @rule(commit=st.booleans())
    def decided(self, commit: bool) -> None:
        commit = commit and self.said_yes
        assignment = self.machine.assignment
        self.machine.record_decision(commit)
        if commit:
            assert assignment is not None
            assert self.machine.tag_quorum_id == assignment.quorum_id
            step, batches = self.position
            self.position = (step + 1, batches + assignment.contributors)
            self.discards = self.faults = 0
        else:
            self.discards += assignment is not None

    @precondition(lambda self: self.in_phase(Phase.IDLE))
    @rule()
    def count_fault(self) -> None:
        self.machine.faults += 1
        self.faults += 1

    @invariant()
    def check_tag(self) -> None:
        """A rank is without a tag from the first byte of an installation to its last."""
        if hasattr(self, "machine"):
            assert (self.machine.tag_quorum_id is None) == self.is_installing

    @invariant()
    def check_step(self) -> None:
        """Of what has failed nothing contributes, nor of who heals until it has; a new step forgets what failed."""
        if hasattr(self, "machine"):
            counts = self.quorum is not None and self.quorum.place is not None
            assert self.machine.contributes is (counts and self.failure is None and not self.machine.must_install)
            assert (self.machine.failure, self.machine.assignment) == (self.failure, self.quorum)
            assert (self.machine.discards, self.machine.faults) == (self.discards, self.faults)
            assert not self.has_installed or not self.machine.must_install

    @invariant()
    def check_position(self) -> None:
        """The step moves by a commit or by an installation, and so does the count of batches."""
        if hasattr(self, "machine"):
            assert (self.machine.step, self.machine.batches_committed) == self.position


TestStories = Stories.TestCase
