"""The rules of torchft.md ("Behaviour to match") and quorum.md ("Assignment") once more, the dumb way.

Computed for the whole quorum at once: everybody's answer is read off one list of who takes state from whom.
"""

from dataclasses import dataclass

from protos.membership import Participant, Quorum


@dataclass
class Plan:
    max_step: int
    at_max: list[Participant]
    primary: Participant
    takes_from: dict[str, Participant]  # wire_id of who heals -> its source

    @property
    def contributors(self) -> list[str]:
        return [p.wire_id for p in self.members if p.wire_id not in self.takes_from]

    members: list[Participant]


def plan(quorum: Quorum, group_rank: int, init_sync: bool) -> Plan:
    members = sorted(quorum.participants, key=lambda p: p.wire_id)
    max_step = 0
    for member in members:
        max_step = max(max_step, member.step)
    at_max = [member for member in members if member.step == max_step]
    primary = at_max[group_rank % len(at_max)]
    source = at_max[0] if all(p.tag_quorum_id is not None for p in members) else primary
    recovering, up_to_date = [], []
    for member in members:
        is_forced = init_sync and max_step == 0 and member is not source
        (recovering if member.step < max_step or is_forced else up_to_date).append(member)
    takes_from = {}
    for i, member in enumerate(recovering):
        takes_from[member.wire_id] = up_to_date[(i + group_rank) % len(up_to_date)]
    return Plan(max_step, at_max, primary, takes_from, members)
