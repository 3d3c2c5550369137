"""All ranks have asked: as text, what each request and answer leads to. test_group_properties.py draws them.

ranks=2                                 a group of two, called a unless `group` says otherwise
ask(1, 0, 5, tag=3); ask(2, 1, 5)       events: call 1 is of rank 0 at step 5
    join 1: step=5                      and what follows; of a join all that is not as in JOINED
formed(1, 4, a(5), b(6))                the answer to join 1: quorum 4 of these participants, at these steps
    quorum 4 for step 6
    1 2: heals from b                   the calls that it is the answer to
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from lighthouse_protocol import refusals
from lighthouse_protocol.messages.membership import Assignment, CatchUp, Distrust, DistrustKind, Participant, Tag
from lighthouse_protocol.messages.session import JoinAccepted, JoinRejected, JoinRequest, WithdrawRequest
from lighthouse_protocol.refusals import InvalidRequest, WrongState
from manager.group import events
from manager.group.events import QuorumRequest
from manager.group.machine import GroupMachine
from manager.group.requests import assign
from tests.manager.builders import ask, member, quorum
from tests.manager.groups import told, unwatched
from tests.manager.scripts import player
from tests.scenarios.paragraphs import scenarios_of

TORN = Distrust(DistrustKind.NOT_APPLIED, "rank 1: step 5 was not applied")
JOINED = {
    "incarnation": "L.0",
    "tag_quorum_id": None,
    "ranks_disagree": False,
    "shrink_only": False,
    "commit_failures": 0,
    "seen_quorum_id": 0,
    "deadline_at": 100.0,
    "handles": "",
    "catch_up": False,
    "works_at": None,
    "has_source": False,
    "compares": False,
    "distrust": None,
    "heals_first": None,
}
"""What a join says unless its ranks say otherwise, but for its number and its step."""


def join_of(effects: Sequence[events.Effect]) -> JoinRequest:
    [join] = [e.message for e in effects if isinstance(e, events.Sent) and isinstance(e.message, JoinRequest)]
    return join


class Group:
    """That the text tells."""

    stands = False

    def __init__(self, name: str, size: int) -> None:
        self.machine = unwatched(size, name, encode_handles=lambda handles: " ".join(handles).strip().encode())
        self.name, self.size = name, size
        self.asks: dict[int, QuorumRequest] = {}
        self.words = vars(refusals) | {
            "ask": self.ask,
            "formed": self.formed,
            "Withdrawn": lambda call: self.machine.handle(events.CallEnded(call), 0),
            "JoinFailed": lambda number, error: self.machine.handle(told(JoinRejected(number, error)), 0),
            "CatchUp": CatchUp,
            "Tag": Tag,
            "TORN": TORN,
            **{name: partial(member, name) for name in "abc"},
        }

    def ask(self, call: int, rank: int, step: int, *, tag: int | None = None, **fields: Any) -> Sequence[events.Effect]:
        self.asks[call] = ask(call, rank, step, tag_quorum_id=tag, **fields)
        return self.machine.handle(self.asks[call], 0)

    def formed(
        self, number: int, quorum_id: int, *members: Participant, stands: bool = False
    ) -> Sequence[events.Effect]:
        self.stands = stands
        return self.machine.handle(told(JoinAccepted(number, quorum(*members, quorum_id=quorum_id), stands)), 0)

    def tell(self, line: str) -> list[str]:
        return [said for word in line.split("; ") for said in self.follows(eval(word, self.words))]  # of a file of ours

    def follows(self, effects: Sequence[events.Effect]) -> list[str]:
        by_text = groupby(filter(None, map(self.show, effects)), key=lambda each: each[1])
        answers = [e.assignment for e in effects if isinstance(e, events.QuorumAnswered)][:1]
        entered = [f"quorum {answer.quorum_id} for step {answer.max_step}" for answer in answers]
        return [*entered, *(f"{' '.join(who for who, _ in each)}{text}" for text, each in by_text)]

    def show(self, effect: events.Effect) -> tuple[str, str] | None:
        """The call, and what is said to it."""
        match effect:
            case events.Sent(JoinRequest() as join):
                return "", f"join {join.number}: {self.join(join)}"
            case events.Sent(WithdrawRequest(number)):
                return "", f"join {number} is taken back"
            case events.QuorumAnswered(call, assignment, formed):
                asked = self.asks[call]
                assert formed is not None
                assert assignment == assign(formed, self.name, asked.group_rank, asked.init_sync, stands=self.stands)
                return str(call), f": {part_of(assignment)}"
            case events.CallRefused(call, error):
                return str(call), f": {type(error).__name__}: {error}"
            case _:
                return None

    def join(self, join: JoinRequest) -> str:
        me = join.participant
        others = {"deadline_at": join.time_left_s, "handles": me.wire.decode()}
        says = {name: others[name] if name in others else getattr(me, name) for name in JOINED}
        says["distrust"] = "TORN" if me.distrust == TORN else me.distrust
        told = [f"{name}={value}" for name, value in says.items() if value != JOINED[name]]
        return ", ".join([f"step={me.step}", *told])


def part_of(assignment: Assignment) -> str:
    names = assignment.replica_ids
    source = f" from {names[assignment.heal_from_rank]}" if assignment.heal_from_rank is not None else ""
    serves = f", serves {' '.join(names[rank] for rank in assignment.serve_to)}" if assignment.serve_to else ""
    if assignment.catches_up:
        return f"catches up{source}{serves}"
    if assignment.heals:
        return f"heals{source}{serves}"
    return f"{'adds zeros' if assignment.place is None else 'takes part'}{serves}"


def begin(line: str) -> Group | None:
    if not line.startswith("ranks="):
        return None
    options = dict(word.split("=") for word in line.split())
    return Group(options.get("group", "a"), int(options["ranks"]))


play = player(begin)


@scenarios_of(Path(__file__).with_name("gather.txt"), play)
def test_what_a_request_leads_to(paragraph: str):
    assert play(paragraph).splitlines() == paragraph.splitlines()


@pytest.mark.parametrize("is_agent", [False, True])
@pytest.mark.parametrize("group_rank", [0, 1, 2])
def test_agents_and_torchft_callers_of_one_quorum_agree_who_serves_whom(is_agent: bool, group_rank: int):
    """Group a's ranks are Agents, group b's torchft's Managers, or the other way round; all are at step 0."""
    agents, others = {"tag_quorum_id": 0, "incarnation": "x.0"}, {}
    q = quorum(member("a", **(agents if is_agent else others)), member("b", **(others if is_agent else agents)))
    serves, takes = [], []
    for name, is_ours in (("a", is_agent), ("b", not is_agent)):
        m = gathered(3, name=name, rank_incarnation="w" if is_ours else "")
        effects = m.handle(told(JoinAccepted(1, q, False)), 0)
        mine = [e.assignment for e in effects if isinstance(e, events.QuorumAnswered)][group_rank]
        serves += [(target, mine.replica_rank) for target in mine.serve_to]
        takes += [(mine.replica_rank, mine.heal_from_rank)] if mine.heals else []
    assert len(takes) == 1, "one of the two takes the other's state"
    assert serves == takes


def gathered(size: int, step: int = 0, name: str = "a", **fields: object) -> GroupMachine:
    """All ranks of group `name` have asked (calls 1, 2, ...): join 1 was sent."""
    machine = unwatched(size, name)
    for rank in range(size):
        effects = machine.handle(ask(rank + 1, rank, step, **fields), 0)
    assert join_of(effects).number == 1
    return machine


def test_a_rank_that_starts_anew_takes_the_group_s_step_along():
    """A session that opens before its mates have asked says the new incarnation, and that step."""
    m = gathered(2, step=5, rank_incarnation="w")
    m.handle(told(JoinAccepted(1, quorum(member("a", 5)), False)), 0)
    m.handle(ask(3, 0, 0, rank_incarnation="again"), 0)
    assert (m.incarnation, m.group.step) == ("L.1", 0)


def test_the_checkpoint_address_is_that_of_the_rank_s_last_ask():
    m = gathered(2, step=5)
    assert m.requests.checkpoint_address(1, 5) == m.requests.checkpoint_address(1, None) == "ckpt1"
    for machine, rank, step, error, why in (
        (m, 1, 4, WrongState, "at step 5, not at 4"),
        (m, 1, 6, WrongState, "at step 5, not at 6"),
        (m, 2, None, InvalidRequest, "rank: is 2"),
        (unwatched(), 1, None, WrongState, "rank 1 has not asked"),
    ):
        with pytest.raises(error, match=why):
            machine.requests.checkpoint_address(rank, step)
