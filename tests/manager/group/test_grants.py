"""When a manager lets its ranks into the next step by itself: as text, conditions 1 to 3 of grants.py, one by one.

past=5                          quorum 1, formed for step 5, which all ranks have committed; its lease is valid until
                                4. holds=5: the same without that commit; new: no quorum is held
late=c                          as holds=5, at group c of two ranks, which is told to heal when it has begun to compute
lags=a                          as holds=5, at group a of two ranks, which catches up
recalled(); ask(0, 6)           an order of the lighthouse; rank 0 asks for step 6, at 1 unless `at` says otherwise
    recalled 5                  how the quorum is held, if that has changed, and what the rank is answered
    wait
offer()                         all ranks have committed: may they go on with the decision?
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lighthouse_protocol.messages.membership import CatchUp, Distrust, DistrustKind, Participant, Quorum, Tag
from lighthouse_protocol.messages.session import HoldState, QuorumOrder, QuorumPhase
from lighthouse_protocol.refusals import InternalError
from manager.group.events import PendingVote
from manager.group.records import ReplicaGroup
from manager.group.requests import LEASE_SHARE, QuorumRequests, Verdict, assign, decide_request
from tests.manager.builders import ask, member
from tests.manager.groups import formed, order
from tests.manager.scripts import player
from tests.scenarios.paragraphs import scenarios_of

UNTIL = 4.0
LATE = Quorum(1, tuple(member(name, 3 if name == "c" else 5, heals_first=name == "b") for name in "abc"))
LAGGING = Quorum(1, (member("a", 2, catch_up=True), member("b", 5), member("c", 5)))
QUORUMS = {"late": LATE, "lags": LAGGING}
WORDS = {
    "TORN": Distrust(DistrustKind.NOT_APPLIED, "rank 0: step 5 was committed and not applied"),
    "LAGS": CatchUp(True, Tag(2, 1), has_source=True),
    "THERE": CatchUp(True, None, has_source=True),
    "FAILED": CatchUp(True, Tag(2, 1), has_source=False),
}


def cast(rank: int, quorum_id: int | None, step: int) -> PendingVote:
    return PendingVote(0, rank, step, True, quorum_id)


def holds(quorum: Quorum, step: int = 5, name: str = "a", size: int = 2) -> QuorumRequests:
    """A quorum formed for `step`, whose lease is valid until UNTIL."""
    machine = QuorumRequests(ReplicaGroup(Participant(name, group_world_size=size)))
    machine.hold(quorum, step)
    machine.renew_lease(UNTIL)
    return machine


class Told:
    """Each word gives what is answered; empty: nothing."""

    def __init__(self, machine: QuorumRequests) -> None:
        self.machine = machine
        self.shown = self.state
        self.words = WORDS | {
            **{phase.value: partial(self.obey, phase) for phase in QuorumPhase},
            "renew": machine.renew_lease,
            "leave": machine.leave,
            "committed": machine.record_committed_step,
            "take": lambda quorum_id, step: machine.hold(formed(quorum_id, step, "abc"), step),
            "ask": self.ask,
            "voted": lambda *vote: "all have voted" if machine.record_vote(cast(*vote)) else "",
            "offer": lambda now=1: "goes on" if machine.grant_next(now) else "does not go on",
            "discard": lambda of=1: "the discard ends it" if machine.should_end_on_discard(of) else "it goes on",
            "give_up": lambda: machine.give_up() and "the ranks are told",
        }

    @property
    def state(self) -> str:
        standing = self.machine._group.standing
        if standing is None:
            return "nothing held"
        held = standing.held
        done = ", has done its late step" if standing.is_late and held.mode is HoldState.JOINING else ""
        wants = ", wants another" if held.wants_next else ""
        return f"{held.mode} {held.granted}" + (f" of {held.quorum_id}" if held.quorum_id != 1 else "") + done + wants

    def obey(self, phase: QuorumPhase, upto: int = 0, of: int = 1) -> str:
        return "the ranks are told" if self.machine.apply_order(order(phase, upto, of)) else ""

    def ask(self, group_rank: int, step: int, at: float = 1.0, **fields: object) -> str:
        request = ask(1, group_rank, step, **fields)
        decision = decide_request(self.machine._group, request, at)
        if decision.mode is not None:
            self.machine._group.standing.mode = decision.mode
        match decision.verdict:
            case Verdict.GRANT | Verdict.REPEAT:
                is_first = decision.verdict is Verdict.GRANT
                assignment = self.machine.grant(request, is_first=is_first)
                assert assignment.max_step == self.machine._group.standing.granted == step
                return "granted first" if is_first else "granted, and revoked" if assignment.revoked else "granted"
            case Verdict.WAIT:
                return "wait"
            case _:
                return "join, and gives up" if decision.mode is HoldState.REVOKED else "join"

    def tell(self, line: str) -> list[str]:
        return list(filter(None, map(self.follows, line.split("; "))))

    def follows(self, word: str) -> str:
        answer = eval(word, self.words)  # of a file of ours
        was, self.shown = self.shown, self.state
        return "; ".join(filter(None, (answer, self.shown if self.shown != was else "")))


def begin(line: str) -> Told | None:
    what, _, of = line.partition("=")
    if what in QUORUMS:
        return Told(holds(QUORUMS[what], name=of, size=2))
    if what == "new":
        return Told(QuorumRequests(ReplicaGroup(Participant("a", group_world_size=1))))
    if what not in ("holds", "past"):
        return None
    machine = holds(formed(1, int(of)), int(of))
    if what == "past":
        machine.record_committed_step(1, int(of))
    return Told(machine)


play = player(begin)


@scenarios_of(Path(__file__).with_name("grants.txt"), play)
def test_what_is_granted(paragraph: str):
    assert play(paragraph).splitlines() == paragraph.splitlines()


def test_one_that_is_told_too_late_counts_the_votes_of_this_quorum_alone():
    machine = holds(formed(9, 4, "abc"), 4, name="c", size=2)
    for rank in range(2):
        assert not machine.record_vote(cast(rank, 9, 4))
    machine.hold(LATE, 5)
    decision = decide_request(machine._group, ask(1, 1, 3, commit_failures=1), 1)
    assert (decision.verdict, decision.mode) == (Verdict.GATHER, HoldState.REVOKED)


def test_the_ranks_hear_of_a_lost_group_once_in_each_quorum():
    machine = holds(formed(1, 5), 5)
    for quorum_id in (1, 2):
        machine.hold(formed(quorum_id, 5), 5)
        machine.give_up()
        lost = QuorumOrder(quorum_id, QuorumPhase.REVOKED, reason="b: ended", lost="b")
        assert [machine.apply_order(lost), machine.apply_order(lost)] == [True, False]


@pytest.mark.parametrize("mode", HoldState)
def test_no_order_says_that_a_quorum_that_is_held_is_none(mode: HoldState):
    machine = holds(formed(1, 5), 5)
    machine._group.standing.mode = mode
    with pytest.raises(InternalError, match=f"quorum 1 is {mode}, and the lighthouse's order is none"):
        machine.apply_order(order("none"))


def test_clocks_may_differ_by_a_tenth():
    assert LEASE_SHARE / 0.9 < 0.9, "a manager's slow clock against the lighthouse's fast one"


@pytest.mark.parametrize(("name", "place"), [("a", 0), ("b", None), ("c", 1), ("d", 2)])
def test_after_the_first_step_nobody_heals_and_all_contribute_but_those_that_catch_up(name: str, place: int | None):
    members = (member("a", 5, commit_failures=2), member("b", 2, catch_up=True), member("c", 5), member("d", 3))
    machine = holds(Quorum(4, members), name=name)
    first = machine.assignment(0, True)
    assert first == assign(Quorum(4, members), name, 0, init_sync=True, stands=True)
    for step in (6, 7):
        machine.record_committed_step(4, step - 1)
        assert machine.grant_next(1)
        assert machine.assignment(0, True) == replace(
            first,
            max_step=step,
            max_rank=place,
            max_world_size=3,
            contributors=3,
            place=place,
            healing=(),
            tag_quorum_id=4,
            heal_from_rank=None,
            heal_from_address="",
            other_sources=(),
            serve_to=(),
            commit_failures=0,
        )
