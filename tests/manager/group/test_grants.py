"""When a manager lets its ranks into the next step by itself: as text, conditions 1 to 3 of grants.py, one by one.

past=5                          quorum 1, formed for step 5, which all ranks have committed; its lease is valid until
                                4. holds=5: the same without that commit; new: no quorum is held
recalled(); ask(0, 6)           an order of the lighthouse; rank 0 asks for step 6, at 1 unless `at` says otherwise
    recalled 5                  how the quorum is held, if that has changed, and what the rank is answered
    wait
offer()                         all ranks have committed: may they go on with the decision?
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lighthouse_protocol.messages.membership import PLAIN, CatchUp, Distrust, DistrustKind, Quorum, Tag
from lighthouse_protocol.messages.session import HoldState, QuorumPhase
from manager.group.rules.grants import LEASE_SHARE, Granted, GrantMachine, Join, Wait
from manager.group.rules.request import QuorumRequest
from tests.manager.builders import ask, member
from tests.manager.groups import formed, held, order
from tests.scenarios.paragraphs import scenarios_of

UNTIL = 4.0
TORN = Distrust(DistrustKind.NOT_APPLIED, "rank 0: step 5 was committed and not applied")


def holds(step: int = 5, quorum: Quorum | None = None) -> GrantMachine:
    """Quorum 1, formed for `step`, whose lease is valid until UNTIL."""
    machine = GrantMachine("a")
    machine.take(quorum or formed(1, step), step)
    machine.renew(UNTIL)
    return machine


class Script:
    """Each word gives what is answered; empty: nothing."""

    def __init__(self, beginning: str) -> None:
        what, _, step = beginning.partition("=")
        self.machine = GrantMachine("a") if what == "new" else holds(int(step))
        if what == "past":
            self.machine.committed(1, int(step))
        self.shown = self.state
        self.words = {
            **{phase.value: partial(self.obey, phase) for phase in QuorumPhase},
            **{name: getattr(self.machine, name) for name in ("committed", "renew", "drop", "leave")},
            "take": lambda quorum_id, step: self.machine.take(formed(quorum_id, step), step),
            "ask": self.ask,
            "offer": lambda now=1: "goes on" if self.machine.offer(now) else "does not go on",
            "give_up": lambda: self.machine.give_up() and "the ranks are told",
            "TORN": TORN,
        }

    @property
    def state(self) -> str:
        held = self.machine.held
        if held is None:
            return "nothing held"
        return f"{held.mode} {held.granted}" + (f" of {held.quorum_id}" if held.quorum_id != 1 else "")

    def obey(self, phase: QuorumPhase, upto: int = 0, of: int = 1) -> str:
        return "the ranks are told" if self.machine.obey(order(phase, upto, of)) else ""

    def ask(self, group_rank: int, step: int, at: float = 1.0, **fields: object) -> str:
        match self.machine.decide(ask(1, group_rank, step, **fields), at):
            case Granted(assignment, is_first):
                assert assignment.max_step == self.machine.granted == step
                return "granted first" if is_first else "granted, and revoked" if assignment.revoked else "granted"
            case Wait():
                return "wait"
            case Join(gives_up):
                return "join, and gives up" if gives_up else "join"

    def tell(self, word: str) -> str:
        answer = eval(word, self.words)  # of a file of ours
        was, self.shown = self.shown, self.state
        return "; ".join(filter(None, (answer, self.shown if self.shown != was else "")))


def play(paragraph: str) -> str:
    lines: list[str] = []
    script = Script("new")
    for line in paragraph.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line.startswith(("new", "holds=", "past=")):
            script = Script(line)
        elif not line.startswith("#"):
            answers = (script.tell(word) for word in line.split("; "))
            lines += [f"    {answer}" for answer in answers if answer]
    return "\n".join(lines)


@scenarios_of(Path(__file__).with_name("grants.txt"), play)
def test_what_is_granted(paragraph: str):
    assert play(paragraph).splitlines() == paragraph.splitlines()


def test_clocks_may_differ_by_a_tenth():
    assert LEASE_SHARE / 0.9 < 0.9, "a manager's slow clock against the lighthouse's fast one"


def decided(machine: GrantMachine, what: QuorumRequest, now: float = 1.0) -> object:
    """True: granted first; False: granted again; or Wait, or Join."""
    decision = machine.decide(what, now)
    return decision.is_first if isinstance(decision, Granted) else type(decision)


class TestAssignment:
    def test_of_the_step_it_was_formed_for_is_the_quorums(self):
        quorum = Quorum(1, (member("a", 4), member("b", 5)))
        machine = holds(5, quorum)
        decision = machine.decide(ask(1, 0, 5), 0)
        assert isinstance(decision, Granted)
        assignment = decision.assignment
        assert (assignment.heals, assignment.heal_from_rank, assignment.contributors) == (True, 1, 1)
        assert (assignment.max_rank, assignment.max_world_size) == (None, 1)

    def test_after_it_nobody_heals_and_all_contribute(self):
        quorum = Quorum(1, (member("a", 4), member("b", 5, commit_failures=2), member("c", 5)))
        machine = holds(5, quorum)
        before = machine.assignment(0, True)
        machine.committed(1, 5)
        decision = machine.decide(ask(1, 0, 6), 0)
        assert isinstance(decision, Granted)
        after = decision.assignment
        assert (after.heals, after.heal_from_address, after.serve_to) == (False, "", ())
        assert (after.max_step, after.max_rank, after.max_world_size, after.contributors) == (6, 0, 3, 3)
        assert (after.commit_failures, before.commit_failures) == (0, 2)
        assert (after.store_address, after.primary_address) == (before.store_address, before.primary_address)
        assert (after.replica_rank, after.replica_ids) == (0, ("a", "b", "c"))

    def test_who_served_serves_no_more(self):
        machine = holds(5, Quorum(1, (member("a", 5), member("b", 4))))
        assert machine.assignment(0, True).serve_to == (1,)
        machine.committed(1, 5)
        assert machine.offer(0)
        assert machine.assignment(0, True).serve_to == ()


class TestToldTooLate:
    """c, of two ranks, is told to heal when they have begun to compute; quorum 1 was formed for step 5."""

    Q = Quorum(
        1, (member("a", 5, heals_first=False), member("b", 5, heals_first=True), member("c", 3, heals_first=False))
    )

    def of(self, name: str) -> GrantMachine:
        machine = GrantMachine(name, 2)
        machine.take(self.Q, 5)
        machine.renew(UNTIL)
        return machine

    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_the_quorum_is_for_its_first_step_only(self, name: str):
        assert self.of(name).held == held("resumed", 5)

    def test_its_peers_commit_that_and_join(self):
        machine = self.of("a")
        machine.committed(1, 5)
        assert not machine.offer(1)
        assert [decided(machine, ask(call, call, 6)) for call in (0, 1)] == [Join, Join]
        assert (machine.mode, machine.has_done_late_step) == (HoldState.JOINING, False)
        assert machine.ends_by_discard(1)

    def test_its_own_discard_ends_nothing_and_it_joins_when_all_its_ranks_have_voted(self):
        """Rank 1 is through; rank 0 is still in the step with its peers, which must not be told to end that."""
        machine = self.of("c")
        assert not machine.ends_by_discard(1)
        assert not machine.voted(1, 1, 5)
        assert decided(machine, ask(1, 1, 3, commit_failures=1)) is Wait
        assert (machine.mode, machine.has_done_late_step) == (HoldState.RESUMED, False)
        assert machine.voted(0, 1, 5)
        for group_rank in (0, 1):
            assert machine.decide(ask(2, group_rank, 3, commit_failures=1), 1) == Join(gives_up=False)
        assert (machine.mode, machine.has_done_late_step) == (HoldState.JOINING, True)

    def test_also_while_the_quorum_is_recalled(self):
        machine = self.of("c")
        machine.obey(order("recalled"))
        assert [machine.voted(group_rank, 1, 5) for group_rank in (0, 1)] == [False, True]
        assert machine.decide(ask(1, 0, 3, commit_failures=1), 1) == Join(gives_up=False)
        assert machine.has_done_late_step

    @pytest.mark.parametrize("vote", [(0, 1, 4), (0, 7, 5), (0, None, 3)])
    def test_a_rank_of_it_that_asks_before_it_has_voted_ends_the_quorum(self, vote: tuple[int, int | None, int]):
        """Its answer was lost: it takes no part in the step, and its peers would wait for it. A vote for anything else
        is no part in it either."""
        machine = self.of("c")
        machine.voted(1, 1, 5)
        machine.voted(*vote)
        assert machine.decide(ask(1, 0, 3, commit_failures=1), 1) == Join(gives_up=True)
        assert (machine.mode, machine.has_done_late_step) == (HoldState.REVOKED, False)

    def test_the_next_quorum_knows_nothing_of_it(self):
        machine = self.of("c")
        machine.voted(0, 1, 5)
        machine.voted(1, 1, 5)
        machine.take(formed(2, 6, "abc"), 6)
        assert machine.held == held("standing", 6, quorum_id=2)
        assert machine.ends_by_discard(2)
        assert machine.decide(ask(1, 0, 6, commit_failures=1), 1) == Join(gives_up=True)


class TestCatchingUp:
    """a catches up in quorum 4, which was formed for step 5; its group has two ranks."""

    Q = Quorum(4, (member("a", 2, catch_up=True), member("b", 5), member("c", 5)))
    LAGS = CatchUp(True, Tag(2, 1), has_source=True)
    THERE = CatchUp(True, None, has_source=True)
    FAILED = CatchUp(True, Tag(2, 1), has_source=False)

    def machine(self, name: str = "a", size: int = 2) -> GrantMachine:
        machine = GrantMachine(name, size)
        machine.take(self.Q, 5)
        machine.renew(UNTIL)
        return machine

    def step(self, machine: GrantMachine, step: int, *words: CatchUp) -> None:
        machine.committed(4, step - 1)
        for rank, catch_up in enumerate(words):
            assert isinstance(machine.decide(ask(rank + 1, rank, step, catch_up=catch_up), 1), Granted)

    @pytest.mark.parametrize(("name", "place"), [("a", None), ("b", 0), ("c", 1)])
    def test_contributes_nothing_for_as_long_as_the_quorum_stands(self, name: str, place: int | None):
        machine = self.machine(name, 1)
        for step in (6, 7):
            self.step(machine, step, self.LAGS)
            assignment = machine.assignment(0, True)
            assert (assignment.contributors, assignment.max_world_size, assignment.max_rank) == (2, 2, place)
            assert (assignment.catches_up, assignment.heals, assignment.serve_to) == (name == "a", False, ())
            assert (assignment.max_step, assignment.tag_quorum_id, assignment.has_healing) == (step, 4, False)

    @pytest.mark.parametrize("words", [(LAGS, LAGS), (THERE, LAGS), (LAGS, THERE)])
    def test_wants_nothing_while_a_rank_is_on_its_way(self, words: tuple[CatchUp, ...]):
        machine = self.machine()
        self.step(machine, 6, *words)
        assert machine.held == held("standing", 6, quorum_id=4)

    @pytest.mark.parametrize("words", [(THERE, THERE), (FAILED, LAGS), (THERE, FAILED)])
    def test_wants_the_next_quorum_when_all_are_there_or_one_cannot_get_there(self, words: tuple[CatchUp, ...]):
        machine = self.machine()
        self.step(machine, 6, *words[:1])
        assert machine.held == held("standing", 6, quorum_id=4), "not all have asked"
        self.step(machine, 6, *words)
        wanted = replace(held("standing", 6, quorum_id=4), wants_next=True)
        assert machine.held == wanted
        self.step(machine, 7, self.LAGS)
        assert machine.held == replace(wanted, granted=7), "it says so until the quorum is over"
        machine.take(replace(self.Q, quorum_id=5), 8)
        assert machine.held == held("standing", 8, quorum_id=5)

    def test_not_by_what_was_asked_before_the_quorum(self):
        machine = self.machine()
        for rank in (0, 1):
            assert isinstance(machine.decide(ask(rank + 1, rank, 5, catch_up=PLAIN), 1), Granted)
        assert machine.held == held("standing", 5, quorum_id=4)

    def test_not_by_ranks_of_different_steps(self):
        machine = self.machine()
        self.step(machine, 6, self.THERE)
        machine.committed(4, 6)
        assert isinstance(machine.decide(ask(9, 1, 7, catch_up=self.THERE), 1), Granted)
        assert machine.held == held("standing", 7, quorum_id=4)

    def test_others_want_nothing(self):
        machine = self.machine("b", 1)
        self.step(machine, 6, PLAIN)
        assert machine.held == held("standing", 6, quorum_id=4)
