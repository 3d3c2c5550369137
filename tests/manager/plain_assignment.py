"""The rules of an assignment, as torchft has them, once more the dumb way.

Computed for the whole quorum at once: everybody's answer is read off one list of who takes state from whom.
"""

from dataclasses import dataclass

from lighthouse_protocol.messages.membership import Participant, Quorum


@dataclass
class Plan:
    max_step: int
    at_max: list[Participant]
    primary: Participant
    takes_from: dict[str, Participant]  # wire_id of who heals -> its source
    members: list[Participant]
    up_to_date: list[Participant]
    catching_up: list[Participant]
    compares: bool
    healing: list[Participant]
    contributors: list[str]


def plan(quorum: Quorum, group_rank: int, init_sync: bool, stands: bool = False) -> Plan:
    members = sorted(quorum.participants, key=lambda p: p.wire_id)
    max_step = 0
    for member in members:
        max_step = max(max_step, member.step)
    at_max = [member for member in members if member.step == max_step]
    primary = at_max[group_rank % len(at_max)]
    source = primary
    if not [p for p in members if p.tag_quorum_id is None and not p.ranks_disagree]:
        whole = [p for p in at_max if not p.ranks_disagree]
        source = (whole + at_max)[0]
    recovering, up_to_date = [], []
    for member in members:
        is_forced = init_sync and max_step == 0 and member is not source
        (recovering if member.step < max_step or is_forced else up_to_date).append(member)
    catching_up, served, healing, contributors = [], [], [], [p.wire_id for p in up_to_date]
    all_are_agents = [p for p in members if p.heals_first is None] == []
    for member in recovering:
        if stands and member.catch_up and member.step < max_step:
            catching_up.append(member)
            if not member.has_source:
                served.append(member)
        elif not all_are_agents:
            served.append(member)
            healing.append(member)
        elif member.heals_first:
            served.append(member)
            healing.append(member)
            contributors.append(member.wire_id)
    takes_from = {}
    for i, member in enumerate(served):
        takes_from[member.wire_id] = up_to_date[(i + group_rank) % len(up_to_date)]
    compares = not [member for member in members if not member.compares]
    contributors.sort()
    return Plan(
        max_step, at_max, primary, takes_from, members, up_to_date, catching_up, compares, healing, contributors
    )
