"""The CatchUpMachine: rule by rule, and under drawn quorums, commits and transfers against the true states."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_client.healing.rules.catch_up import (
    APPLIED_AT_ONCE,
    MAX_KEPT_STEPS,
    MAX_TRIES,
    CatchUpAction,
    CatchUpMachine,
    PendingStep,
    Transfer,
)
from lighthouse_protocol.messages.membership import Assignment, Tag
from tests.agent_client.assignments import assignment

HOLDS = Tag(0, 0)
BEGINS = Tag(10, 3)


def lead(begins: Tag = BEGINS, *, catches_up: bool = True, source: str = "a", names: str = "abc") -> Assignment:
    """What the last of `names` is told of a quorum of theirs; without a `source`, it is dealt none."""
    place, (step, tag_quorum_id) = len(names) - 1, begins
    told = assignment(place, replica_ids=tuple(names), max_step=step, tag_quorum_id=tag_quorum_id)
    dealt = names.index(source) if source else None
    return replace(told, catching_up=(place,) if catches_up else (), heal_from_rank=dealt)


def following(steps: int = 0, quorum_id: int = 4) -> CatchUpMachine[Tag]:
    """Quorum 4 has dealt it a as its source, and committed so many steps."""
    machine: CatchUpMachine[Tag] = CatchUpMachine()
    assert machine.choose_action(lead(), HOLDS) is CatchUpAction.FETCH
    for step in range(steps):
        commit(machine, Tag(BEGINS.step + step + 1, quorum_id))
    return machine


def commit(machine: CatchUpMachine[Tag], tag: Tag) -> None:
    machine.record_commit(PendingStep(tag, 1, tag), tag)


def tags(machine: CatchUpMachine[Tag]) -> list[Tag]:
    return [kept.tag for kept in machine.kept_steps]


class TestFollowing:
    def test_one_that_is_behind_works_at_the_step_of_the_quorum_and_holds_its_own(self):
        machine = following()
        assert (machine.held, machine.peer_tag, machine.transfer) == (HOLDS, BEGINS, Transfer.UNDER_WAY)
        commit(machine, Tag(11, 4))
        assert (machine.held, machine.peer_tag) == (HOLDS, Tag(11, 4))

    def test_one_whose_group_is_behind_and_is_not_itself_does_nothing(self):
        machine: CatchUpMachine[Tag] = CatchUpMachine()
        assert machine.choose_action(lead(), BEGINS) is CatchUpAction.GO_ON
        assert (machine.is_catching_up, machine.has_source) == (False, True)

    def test_a_state_without_a_known_tag_is_no_other_s(self):
        machine: CatchUpMachine[Tag] = CatchUpMachine()
        assert machine.choose_action(lead(Tag(10, None)), Tag(10, None)) is CatchUpAction.FETCH

    def test_where_the_group_does_not_catch_up_nothing_is_followed(self):
        machine: CatchUpMachine[Tag] = CatchUpMachine()
        assert machine.choose_action(lead(catches_up=False), HOLDS) is CatchUpAction.GO_ON
        assert not machine.is_catching_up


class TestApplying:
    def test_nothing_before_the_snapshot_is_installed(self):
        machine = following(2)
        assert machine.due_steps() == ()
        machine.record_arrival(BEGINS)
        assert machine.due_steps() == ()
        machine.record_install()
        assert [kept.tag for kept in machine.due_steps()] == [Tag(11, 4), Tag(12, 4)]

    def test_in_order_a_few_at_a_time_and_then_it_holds_what_it_works_at(self):
        machine = following(APPLIED_AT_ONCE + 1)
        machine.record_arrival(BEGINS)
        machine.record_install()
        assert machine.held == BEGINS
        for number, kept in enumerate(machine.due_steps(), start=1):
            assert kept.tag == Tag(10 + number, 4)
            machine.record_applied()
            assert machine.held == kept.tag
        assert len(machine.due_steps()) == 1
        machine.record_applied()
        assert (machine.is_catching_up, machine.due_steps()) == (False, ())

    def test_an_arrival_that_nobody_waits_for_is_nothing(self):
        machine = following(1)
        machine.record_failure()
        machine.record_arrival(BEGINS)
        assert machine.transfer is Transfer.FAILED


class TestAnotherQuorum:
    def test_that_begins_where_it_is_goes_on_with_the_same_snapshot(self):
        machine = following(2)
        assert machine.choose_action(lead(Tag(12, 4), source=""), Tag(12, 4)) is CatchUpAction.GO_ON
        commit(machine, Tag(13, 6))
        assert (tags(machine), machine.transfer) == ([Tag(11, 4), Tag(12, 4), Tag(13, 6)], Transfer.UNDER_WAY)

    def test_what_others_have_not_committed_is_forgotten(self):
        machine = following(2)
        assert machine.choose_action(lead(Tag(11, 4), source=""), Tag(12, 4)) is CatchUpAction.GO_ON
        assert (tags(machine), machine.peer_tag) == ([Tag(11, 4)], Tag(11, 4))

    @pytest.mark.parametrize("begins", [Tag(12, 5), Tag(13, 4), Tag(12, None), Tag(9, 3)])
    def test_that_begins_anywhere_else_starts_anew(self, begins: Tag):
        machine = following(2)
        assert machine.choose_action(lead(begins, source="b"), Tag(12, 4)) is CatchUpAction.FETCH
        assert (tags(machine), machine.peer_tag, machine.held, machine.source) == ([], begins, HOLDS, "b")

    def test_and_fails_where_no_source_is_dealt(self):
        machine = following(2)
        assert machine.choose_action(lead(Tag(20, 5), source=""), Tag(12, 4)) is CatchUpAction.GO_ON
        assert (machine.transfer, machine.peer_tag, machine.has_source) == (Transfer.FAILED, Tag(20, 5), False)

    def test_without_the_source_starts_anew(self):
        machine = following(2)
        assert machine.choose_action(lead(Tag(12, 4), source="b", names="bc"), Tag(12, 4)) is CatchUpAction.FETCH
        assert (tags(machine), machine.source) == ([], "b")

    def test_the_source_may_go_once_the_snapshot_is_here(self):
        machine = following(2)
        machine.record_arrival(BEGINS)
        assert machine.choose_action(lead(Tag(12, 4), source="", names="bc"), Tag(12, 4)) is CatchUpAction.GO_ON
        assert machine.has_source

    def test_in_which_it_is_not_behind_leaves_it_with_what_it_holds(self):
        machine = following(2)
        assert machine.choose_action(lead(HOLDS, catches_up=False), Tag(12, 4)) is CatchUpAction.RETURN
        assert (machine.is_catching_up, tags(machine), machine.has_source) == (False, [], False)

    def test_so_does_one_that_begins_with_what_it_holds(self):
        machine = following(2)
        machine.record_arrival(BEGINS)
        machine.record_install()
        assert machine.choose_action(lead(BEGINS), Tag(12, 4)) is CatchUpAction.RETURN
        assert (machine.is_catching_up, machine.has_source) == (False, True)


class TestFailing:
    def test_starts_anew_in_the_next_quorum(self):
        machine = following(2)
        machine.record_failure()
        assert (machine.has_source, machine.can_keep, machine.peer_tag) == (False, False, Tag(12, 4))
        commit(machine, Tag(13, 4))
        assert (tags(machine), machine.peer_tag, machine.held) == ([], Tag(13, 4), HOLDS)
        assert machine.choose_action(lead(Tag(13, 4), source=""), Tag(13, 4)) is CatchUpAction.GO_ON
        assert machine.choose_action(lead(Tag(13, 4)), Tag(13, 4)) is CatchUpAction.FETCH

    def test_too_often_it_heals_plainly(self):
        machine = following()
        for number in range(1, MAX_TRIES + 1):
            machine.record_failure()
            assert machine.heals_blocking is (number == MAX_TRIES)
            machine.choose_action(lead(), BEGINS)
        machine.choose_action(lead(catches_up=False), BEGINS)
        assert not machine.heals_blocking, "and then it may catch up again"

    def test_one_that_got_there_has_all_its_tries_again(self):
        machine = following()
        for _ in range(2):
            for _ in range(MAX_TRIES - 1):
                machine.record_failure()
                assert machine.choose_action(lead(), BEGINS) is CatchUpAction.FETCH
            machine.record_arrival(BEGINS)
            machine.record_install()
            assert not machine.is_catching_up
            assert machine.choose_action(lead(), HOLDS) is CatchUpAction.FETCH
        assert not machine.heals_blocking

    @pytest.mark.parametrize(
        "fail",
        [
            lambda machine: machine.record_failure(is_hopeless=True),
            lambda machine: machine.record_commit(None, Tag(11, 4)),
        ],
        ids=["useless", "no room"],
    )
    def test_at_once_where_another_try_is_hopeless(self, fail: Callable[[CatchUpMachine[Tag]], None]):
        machine = following()
        fail(machine)
        assert (machine.heals_blocking, machine.transfer) == (True, Transfer.FAILED)

    def test_steps_are_not_kept_without_end(self):
        machine = following(MAX_KEPT_STEPS)
        assert len(machine.kept_steps) == MAX_KEPT_STEPS
        commit(machine, Tag(BEGINS.step + MAX_KEPT_STEPS + 1, 4))
        assert (machine.kept_steps, machine.heals_blocking) == ((), True)


# -- against the true states

happenings = st.lists(
    st.one_of(
        st.tuples(
            st.just("quorum"),
            st.integers(0, 5),  # how far back it begins
            st.sampled_from([True, True, True, False]),  # catches up
            st.sampled_from([True, True, False]),  # a source is dealt
            st.sampled_from(["abc", "bc"]),
            st.sampled_from([True, True, True, False]),  # the tag is known
        ),
        st.tuples(st.just("commit"), st.sampled_from([True, True, True, True, False])),
        st.tuples(st.just("commit"), st.just(True)),
        st.tuples(st.just("arrive")),
        st.tuples(st.just("fail")),
    ),
    max_size=60,
)


class World:
    """`states[tag]`: every commit that led to the state of that name. `weights`: those in this rank's."""

    def __init__(self) -> None:
        self.machine: CatchUpMachine[Tag] = CatchUpMachine()
        self.states: dict[Tag, tuple[Tag, ...]] = {HOLDS: ()}
        self.weights: tuple[Tag, ...] = ()
        self.works_at = HOLDS
        self.quorum_id = 0
        self.fetches: Tag | None = None

    def quorum(self, back: int, catches_up: bool, has_source: bool, names: str, is_known: bool) -> None:
        self.quorum_id += 1
        begins = list(self.states)[-1 - min(back, len(self.states) - 1)]
        shown = begins if is_known else Tag(begins.step, None)
        held = self.machine.held or self.works_at
        told = lead(shown, catches_up=catches_up, source=names[0] if has_source else "", names=names)
        action = self.machine.choose_action(told, self.works_at)
        self.works_at = begins
        if action is CatchUpAction.FETCH:
            self.fetches = begins
        if action is CatchUpAction.RETURN:
            assert self.states[held] == self.weights
        if not catches_up:
            self.weights = self.states[begins]  # it was up to date, or has healed plainly
        elif self.machine.is_catching_up:
            assert self.machine.peer_tag == shown

    def commit(self, keeps: bool) -> None:
        machine, tag = self.machine, Tag(self.works_at.step + 1, self.quorum_id)
        if self.quorum_id == 0 or tag in self.states:
            return
        self.states[tag] = (*self.states[self.works_at], tag)
        self.works_at = tag
        if not machine.is_catching_up:
            self.weights += (tag,)
            return
        machine.record_commit(PendingStep(tag, 1, tag) if keeps and machine.can_keep else None, tag)
        if machine.transfer is Transfer.ARRIVED:
            assert self.fetches is not None
            self.weights = self.states[self.fetches]
            machine.record_install()
        else:
            due = machine.due_steps()
            assert len(due) <= APPLIED_AT_ONCE
            for kept in due:
                self.weights += (kept.content,)
                machine.record_applied()

    def arrive(self) -> None:
        if self.fetches is not None and self.machine.transfer is Transfer.UNDER_WAY:
            self.machine.record_arrival(self.fetches)

    def fail(self) -> None:
        if self.machine.transfer is Transfer.UNDER_WAY:
            self.machine.record_failure()

    def check(self) -> None:
        machine = self.machine
        assert self.weights == self.states[machine.held or self.works_at], "what is held has its name"
        steps = [machine.begins.step, *(kept.tag.step for kept in machine.kept_steps)]
        assert not machine.is_catching_up or steps == list(range(steps[0], steps[0] + len(steps))), (
            "no step is left out"
        )
        assert machine.transfer is not Transfer.FAILED or not machine.kept_steps


@settings(max_examples=500)
@given(happenings)
def test_what_is_held_is_always_a_true_state(drawn: list[tuple[Any, ...]]):
    world = World()
    for what, *details in drawn:
        getattr(world, what)(*details)
        world.check()
