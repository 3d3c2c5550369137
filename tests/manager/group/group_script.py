"""A manager's machine told by lines of text; what follows, as lines of text.

joined ranks=2                  how it begins: unwatched, watched, joined, holding or past (groups.py)
0.1 vote(10, 0, 0)              a moment and its events; `tick`: none
    10: commit                  what is answered, said and told; heartbeats without what is usual
0.2 recalled(upto=3)            a message of the lighthouse; answered(2): the acknowledgement of heartbeat 2
"""

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from lighthouse_protocol import refusals
from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Assignment, Decision, Participant, Quorum
from lighthouse_protocol.messages.session import (
    GroupReport,
    Heartbeat,
    HeldQuorum,
    Hello,
    JoinRequest,
    QuorumPhase,
    VoteAnswer,
)
from manager.group import events
from manager.group.machine import GroupMachine
from tests.manager import groups
from tests.manager.builders import ask, member
from tests.manager.groups import FOR_PEOPLE, IDENTITY, echo, formed, handed, order, told, vote
from tests.manager.scripts import player

WORDS: dict[str, Any] = {
    **vars(refusals),
    **vars(session),
    **vars(events),
    **{phase.value: partial(lambda phase, **says: told(order(phase, **says)), phase.value) for phase in QuorumPhase},
    "Quorum": Quorum,
    "answered": lambda number, *said: echo(number, *(each.message for each in said)),
    "ask": lambda call, rank, step=0, *, tag=None, **says: ask(call, rank, step, tag_quorum_id=tag, **says),
    "formed": formed,
    "handed": handed,
    "member": member,
    "told": told,
    "vote": vote,
}
BEGINNINGS = {"unwatched", "watched", "joined", "holding", "past"}


class GroupScript:
    def __init__(self, beginning: str) -> None:
        how, *words = beginning.split()
        options = {name: literal_eval(value) for name, _, value in (word.partition("=") for word in words)}
        self.machine: GroupMachine = getattr(groups, how)(options.pop("ranks"), **options)
        self.held = self.machine.held

    def tell(self, line: str) -> list[str]:
        at, _, what = line.partition(" ")
        lines: list[str] = []
        for word in what.split("; "):
            effects = self.tick(float(at)) if word == "tick" else self.feed(word, float(at))
            lines += [show(effect) for effect in effects if not isinstance(effect, FOR_PEOPLE)]
            if self.machine.held != self.held:
                self.held = self.machine.held
                lines.append(f"now {held_of(self.held)}")
        return lines

    def tick(self, now: float) -> Sequence[events.Effect]:
        return self.machine.tick(now)

    def feed(self, word: str, now: float) -> Sequence[events.Effect]:
        return self.machine.handle(eval(word, WORDS), now)  # of a file of ours


play = player(lambda line: GroupScript(line) if line.partition(" ")[0] in BEGINNINGS else None)


def show(effect: events.Effect) -> str:
    match effect:
        case events.QuorumAnswered(call, assignment, quorum):
            return f"{call}: {step_of(assignment)}{'' if quorum is None else ', which was formed'}"
        case VoteAnswer(call, Decision(commit, following)):
            return f"{call}: {'commit' if commit else 'discard'}{f', and {step_of(following)}' if following else ''}"
        case events.CallRefused(call, error):
            return f"{call}: {type(error).__name__}: {error}"
        case events.Sent(Heartbeat(number, report)):
            return f"heartbeat {number}: {report_of(report)}"
        case events.Sent(JoinRequest(number, participant, time_left_s)):
            return f"join {number} within {time_left_s:g} s: {short(participant)}"
        case events.Sent(message):
            return f"to the lighthouse: {short(message)}"
        case events.Pushed(message, watches):
            return f"to {' '.join(map(str, watches)) or 'no watch'}: {short(message)}"
        case _:
            return short(effect)


def step_of(assignment: Assignment) -> str:
    heals = ", heals" if assignment.heals else ""
    return f"step {assignment.max_step} of quorum {assignment.quorum_id}{heals}{', revoked' * assignment.revoked}"


def report_of(report: GroupReport) -> str:
    return ", ".join(
        filter(
            None,
            (
                held_of(report.held),
                "drains" if report.drains else "",
                f"down: {report.down}" if report.down else "",
                f"missing: {' '.join(map(str, sorted(report.missing)))}" if report.missing else "",
            ),
        )
    )


def held_of(held: HeldQuorum | None) -> str:
    if held is None:
        return "holds none"
    return f"{held.mode} {held.granted} of {held.quorum_id}{', wants another' if held.wants_next else ''}"


def short(value: Any) -> str:
    """As it would be written: without what is not given or only counts, and of a participant without its name and
    addresses."""
    if isinstance(value, refusals.LighthouseError):
        return f"{type(value).__name__}({str(value)!r})"
    if isinstance(value, GroupReport):
        return f"({report_of(value)})"
    if isinstance(value, Enum):
        return repr(value.value)
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    if isinstance(value, Hello | Heartbeat):
        value = replace(value, levels=replace(value.levels, counts=None))
    shown = [
        f"{field.name}={short(getattr(value, field.name))}"
        for field in fields(value)
        if getattr(value, field.name) != field.default
        and (field.default_factory is MISSING or getattr(value, field.name) != field.default_factory())
        and not (isinstance(value, Participant) and field.name in IDENTITY and value.incarnation == "L.0")
    ]
    return f"{type(value).__name__}({', '.join(shown)})"
