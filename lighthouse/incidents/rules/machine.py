"""The incidents of one job: when one begins, what belongs to it, what is done about it, and when training goes on.

1. A stall is one incident from its verdict until something moves again. Its fault is the last move.
2. On its verdict the evidence is asked for; only when that is there does the policy decide (policy.py). A verdict that
   names other ranks, or another cause, has its evidence taken anew, MAX_LOOKS times at most, and never after the policy
   has killed or stopped.
3. The loss of members is an incident as soon as a group asks for the quorum after it, or one forms: if all groups end,
   training is over. The loss of a group that an operator has killed is one at once. All losses of one quorum are one
   incident; the fault is the last heartbeat of the first. A member that is killed because of a stall is lost within
   that incident.
4. A group that joins and says that it holds no state any more (a commit was not applied, or its state differs from that
   of its peers) is an incident, once for each such state: it says so in every join until it has healed.
5. A step that a group discards because its gradients are not finite is an incident.
6. A supervisor says why a process of a member has ended. That explains the loss of the member, before or after it, and
   is part of its incident. If no loss comes within EXIT_KEPT_S, it is an incident by itself.
7. An incident is followed until a step is committed after it, which is read from what is told anyway: the steps that
   managers have let their ranks into, and those that groups join with. A loss is also followed until all lost groups
   have been in a quorum again.

No I/O; time is an argument.
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from lighthouse.incidents.rules.policy import Decision, OnStall, decide
from lighthouse.members.rules.events import MemberLost
from lighthouse_protocol.messages.evidence import RankEvidence
from lighthouse_protocol.messages.incident import (
    Gathered,
    Incident,
    IncidentKind,
    IncidentSummary,
    MemberEvidence,
    suspects_first,
)
from lighthouse_protocol.messages.membership import Distrust, Participant
from lighthouse_protocol.messages.progress import RankName, RejectedStep
from lighthouse_protocol.rules.stall import StallVerdict

MAX_LOOKS = 3
MAX_FOLLOWED = 8
UNCONFIRMED_S = 60.0
MAX_TOLD = 16  # losses by their reasons
MAX_DISTRUSTED = 256  # groups of which the last report is remembered
MAX_SUSPECTS = 64  # by their names
EXIT_KEPT_S = 10.0  # how much earlier than the loss that it explains the end of a process may be reported
MAX_EXITS = 256
MAX_EVIDENCE = 8  # processes of one loss


@dataclass(frozen=True, slots=True)
class Opened:
    incident: Incident


@dataclass(frozen=True, slots=True)
class Changed:
    incident: Incident


@dataclass(frozen=True, slots=True)
class EvidenceWanted:
    """Of all members of the quorum; `took` is to be told what came."""

    id: str
    suspects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ActionDue:
    """`acted` is to be told what came of it."""

    id: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Recovered:
    """A step was committed after the fault."""

    incident: Incident


Effect = Opened | Changed | EvidenceWanted | ActionDue | Recovered


@dataclass(slots=True)
class _Case:
    """`base`: the step beyond which one is committed after the fault; None: the next quorum tells it."""

    incident: Incident
    fault_at: float
    base: int | None = None
    verdict: StallVerdict | None = None
    looks: int = 0
    is_looking: bool = False
    is_final: bool = False
    killed: frozenset[str] = frozenset()
    losses: "_Lost | None" = None
    away: set[str] = field(default_factory=set[str])

    def note(self, **changes: object) -> Incident:
        summary = replace(self.incident.summary, **changes)  # pyright: ignore[reportArgumentType]
        self.incident = replace(self.incident, summary=summary)
        return self.incident

    def has_killed(self, replica_id: str) -> bool:
        """Its loss is of this incident, and of no quorum after it."""
        return replica_id in self.killed and self.incident.summary.quorum_s is None

    @property
    def is_over(self) -> bool:
        summary = self.incident.summary
        is_still = summary.kind is IncidentKind.STALL and summary.over_s is None
        return summary.step_s is not None and not is_still and not self.is_looking and not self.away


@dataclass(slots=True)
class _Lost:
    """The losses of one quorum, which may be the end of the job."""

    first: MemberLost
    noticed_at: float
    noticed_unix_s: float
    by_name: dict[str, MemberLost] = field(init=False)
    _explained: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.by_name = {self.first.replica_id: self.first}

    def explain(self, replica_id: str, exit_: "_Exit") -> None:
        """Add why a process of that group has ended; the first one counts, since the others end because of it."""
        loss, rank = self.by_name[replica_id], f"rank {exit_.evidence.group_rank}"
        if replica_id not in self._explained:
            self._explained.add(replica_id)
            cause = exit_.reason if rank in loss.reason else f"{rank}: {exit_.reason}"
            self.by_name[replica_id] = replace(loss, reason=f"{loss.reason}: {cause}")

    @property
    def text(self) -> str:
        more = f" and {len(self.by_name) - MAX_TOLD} more" if len(self.by_name) > MAX_TOLD else ""
        told = itertools.islice(self.by_name.items(), MAX_TOLD)
        return "; ".join(f"{name}: {loss.reason}" for name, loss in told) + more

    @property
    def suspects(self) -> tuple[str, ...]:
        return tuple(itertools.islice(self.by_name, MAX_SUSPECTS))


@dataclass(frozen=True, slots=True)
class _Exit:
    """A process of a member that has ended, and whose loss has not been noticed yet."""

    reason: str
    evidence: RankEvidence
    at: float
    unix_s: float


class IncidentMachine:
    """`make_id` makes an unused id of a moment of the wall clock. `now` is monotonic and never goes back."""

    def __init__(self, job: str, policy: OnStall, make_id: Callable[[float], str]) -> None:
        self._job = job
        self._policy = policy
        self._make_id = make_id
        self._cases: dict[str, _Case] = {}
        self._stall: _Case | None = None
        self._lost: _Lost | None = None
        self._loss: _Case | None = None  # that of the losses
        self._distrusted: dict[str, Distrust] = {}  # by replica_id, what was said last
        self._rejected: dict[str, int] = {}  # by replica_id, the step
        self._exits: dict[str, list[_Exit]] = {}  # by replica_id

    @property
    def is_followed(self) -> bool:
        """Whether the next committed step matters."""
        return self._lost is not None or any(case.incident.summary.step_s is None for case in self._cases.values())

    @property
    def awaits_quorum(self) -> bool:
        """Whether the next quorum matters."""
        return self._lost is not None or bool(self._cases)

    # -- a stall

    def stalled(self, verdict: StallVerdict, step: int, now: float, unix_s: float) -> list[Effect]:
        """`step`: the highest that a rank was let into."""
        case = self._stall
        if case is None:
            return self._open_stall(verdict, step, now, unix_s)
        if case.is_final or verdict.says_the_same(case.verdict):
            return []  # what follows from a kill is not what it was for
        if case.incident.summary.suspects and not verdict.behind:
            return []  # the rank that was behind is still the cause: the others wait, and go on without it
        case.verdict = verdict
        changed = Changed(case.note(text=verdict.text, suspects=_suspects(verdict)))
        return [changed, *self._look(case)]

    def moved(self, now: float) -> list[Effect]:
        case, self._stall = self._stall, None
        if case is None:
            return []
        changed = Changed(case.note(over_s=now - case.fault_at))
        self._drop_if_over(case)
        return [changed]

    def took(self, id: str, gathered: Gathered, members: Mapping[str, int], now: float) -> list[Effect]:
        """The evidence has come, or was waited for long enough. `members`: the replica groups of the quorum, and how
        many ranks each has."""
        case = self._cases.get(id)
        if case is None or case.verdict is None:
            return []
        case.is_looking = False
        evidence = suspects_first(gathered.evidence, case.incident.summary.suspects)
        case.incident = replace(case.incident, evidence=evidence, missing=gathered.missing)
        first_s = case.incident.summary.evidence_s
        changed = Changed(case.note(evidence_s=now - case.fault_at if first_s is None else first_s))
        if case is not self._stall:
            done = self._note_action(case, "progress resumed: nothing was done", now)
            self._drop_if_over(case)
            return [changed, done]
        decision = decide(self._policy, case.verdict.behind, members)
        if not decision.is_final and decision.text == case.incident.summary.action:
            return [changed]
        case.is_final, case.killed = decision.is_final, frozenset(members if decision.stop else decision.groups)
        return [changed, ActionDue(id, decision)]

    def acted(self, id: str, action: str, now: float) -> list[Effect]:
        case = self._cases.get(id)
        return [] if case is None else [self._note_action(case, action, now)]

    # -- losses

    def lost(self, loss: MemberLost, now: float, unix_s: float, *, is_asked: bool) -> list[Effect]:
        """`is_asked`: a group asks for the next quorum already."""
        if any(case.has_killed(loss.replica_id) for case in self._cases.values()):
            return []
        before = self._lost
        if before is None or before.first.quorum_id != loss.quorum_id:
            self._lost, self._loss = _Lost(loss, now, unix_s), None
        elif loss.replica_id in before.by_name:
            return []
        else:
            before.by_name[loss.replica_id] = loss
        lost = self._lost
        assert lost is not None
        exits = self._exits.pop(loss.replica_id, [])
        for each in exits:
            lost.explain(loss.replica_id, each)
        if self._loss is not None:
            self._loss.away.add(loss.replica_id)
            self._attach(self._loss, loss.replica_id, exits)
            return [Changed(self._loss.note(text=lost.text, suspects=lost.suspects))]
        if exits:
            self._exits[loss.replica_id] = exits  # their evidence belongs to the incident, if there will be one
        return self.asked(now) if is_asked else []

    def killed(self, replica_id: str, quorum_id: int, why: str, now: float, unix_s: float) -> list[Effect]:
        """A person has a member killed: that is an incident at once, and its loss is the same one."""
        return self.lost(MemberLost(replica_id, quorum_id, f"killed {why}", None), now, unix_s, is_asked=True)

    def asked(self, now: float) -> list[Effect]:
        """A group asks for the next quorum: training is to go on."""
        lost = self._lost
        if lost is None or self._loss is not None:
            return []
        if now - lost.noticed_at > UNCONFIRMED_S:
            self._lost = None
            return []
        seen_at = lost.first.last_seen_at
        fault_at = lost.noticed_at if seen_at is None else min(seen_at, lost.noticed_at)
        noticed_s = lost.noticed_at - fault_at
        case = self._begin(IncidentKind.LOSS, lost.text, lost.suspects, fault_at, noticed_s, lost.noticed_unix_s)
        case.losses, case.away, self._loss = lost, set(lost.by_name), case
        for name in lost.by_name:
            self._attach(case, name, self._exits.pop(name, []))
        return [Opened(case.incident)]

    # -- processes that have ended

    def exited(
        self, replica_id: str, reason: str, evidence: RankEvidence, now: float, unix_s: float, *, is_member: bool
    ) -> list[Effect] | None:
        """A supervisor reports that a process of a replica group has ended. `is_member`: of the present quorum.

        Returns:
            None if that is not for this machine: the group is no member, and no loss of it is followed.
        """
        exit_ = _Exit(reason, evidence, now, unix_s)
        for case in reversed(self._cases.values()):
            if case.losses is not None and replica_id in case.away:
                case.losses.explain(replica_id, exit_)
                self._attach(case, replica_id, [exit_])
                return [Changed(case.note(text=case.losses.text))]
        is_lost = self._lost is not None and replica_id in self._lost.by_name
        if is_lost and self._lost is not None:
            self._lost.explain(replica_id, exit_)
        if not (is_member or is_lost) or len(self._exits) >= MAX_EXITS:
            return None
        self._exits.setdefault(replica_id, []).append(exit_)
        return []

    def expire(self, now: float) -> list[Effect]:
        """File the exits that no loss has come for."""
        old = {name: exits for name, exits in self._exits.items() if now >= exits[0].at + EXIT_KEPT_S}
        effects: list[Effect] = []
        for name, exits in old.items():
            del self._exits[name]
            first = exits[0]
            summary = IncidentSummary(
                self._make_id(first.unix_s),
                self._job,
                IncidentKind.EXIT,
                f"{name}: rank {first.evidence.group_rank}: {first.reason}",
                (name,),
                first.unix_s,
                0.0,
                over_s=0.0,
            )
            effects.append(Opened(Incident(summary, tuple(MemberEvidence(name, each.evidence) for each in exits))))
        return effects

    def _attach(self, case: _Case, replica_id: str, exits: list[_Exit]) -> None:
        evidence = (*case.incident.evidence, *(MemberEvidence(replica_id, each.evidence) for each in exits))
        case.incident = replace(case.incident, evidence=evidence[:MAX_EVIDENCE])

    # -- a state that is none

    def listens_to(self, participant: Participant) -> bool:
        """What it says of its state is news."""
        return self._distrusted.get(participant.replica_id) != participant.distrust

    def told(self, replica_id: str, distrust: Distrust | None, now: float, unix_s: float) -> list[Effect]:
        """A group joins, and says whether it holds a state."""
        if distrust is None:
            self._distrusted.pop(replica_id, None)
            return []
        if self._distrusted.get(replica_id) == distrust:
            return []
        self._distrusted[replica_id] = distrust
        while len(self._distrusted) > MAX_DISTRUSTED:
            del self._distrusted[next(iter(self._distrusted))]
        text = f"{replica_id}: {distrust.text}"
        case = self._begin(IncidentKind(distrust.kind), text, (replica_id,), now, 0.0, unix_s)
        return [Opened(case.incident)]

    # -- gradients that are not finite

    def rejected(self, rank: RankName, rejected: RejectedStep | None, now: float, unix_s: float) -> list[Effect]:
        """The step that a group has discarded for its gradients, as it says for a while; None: there is none."""
        if rejected is None:
            self._rejected.pop(rank.replica_id, None)
            return []
        if self._rejected.get(rank.replica_id) == rejected.step:
            return []
        self._rejected[rank.replica_id] = rejected.step
        while len(self._rejected) > MAX_DISTRUSTED:
            del self._rejected[next(iter(self._rejected))]
        suspects = (str(rank),) if rejected.is_own else ()
        text = f"{rank}: step {rejected.step} discarded: {rejected.reason}"
        case = self._begin(IncidentKind.NONFINITE, text, suspects, now, 0.0, unix_s)
        case.base = rejected.step
        return [Opened(case.incident)]

    # -- training goes on

    def formed(
        self, quorum_id: int, step: int, now: float, *, is_new: bool, members: Collection[str] = ()
    ) -> list[Effect]:
        """A quorum was formed for `step`, of `members`."""
        effects = self.asked(now)
        self._lost = self._loss = None
        effects += self.reached(step, quorum_id, now)
        for case in self._cases.values():
            if is_new and case.incident.summary.quorum_s is None:
                effects.append(Changed(case.note(quorum_s=now - case.fault_at, quorum_id=quorum_id)))
            if is_new or case.base is None:
                case.base = step
            effects += self._came_back(case, members, now)
        for id in [id for id, case in self._cases.items() if case.is_over]:
            del self._cases[id]
        return effects

    def _came_back(self, case: _Case, members: Collection[str], now: float) -> list[Effect]:
        if not case.away or not case.away.intersection(members):
            return []
        case.away.difference_update(members)
        return [] if case.away else [Changed(case.note(back_s=now - case.fault_at))]

    def reached(self, step: int, quorum_id: int, now: float) -> list[Effect]:
        """A rank was let into `step` under that quorum, or joins with it: all steps before it are committed."""
        effects: list[Effect] = []
        for case in list(self._cases.values()):
            summary = case.incident.summary
            if case.base is None or step <= case.base or quorum_id < summary.quorum_id or summary.step_s is not None:
                continue
            effects.append(Recovered(case.note(step_s=now - case.fault_at)))
            self._drop_if_over(case)
        return effects

    # -- within

    def _open_stall(self, verdict: StallVerdict, step: int, now: float, unix_s: float) -> list[Effect]:
        still_s = verdict.still_s
        case = self._begin(IncidentKind.STALL, verdict.text, _suspects(verdict), now - still_s, still_s, unix_s)
        case.verdict, case.base = verdict, step
        self._stall = case
        return [Opened(case.incident), *self._look(case)]

    def _look(self, case: _Case) -> list[Effect]:
        if case.is_looking or case.is_final or case.looks >= MAX_LOOKS:
            return []
        case.is_looking, case.looks = True, case.looks + 1
        return [EvidenceWanted(case.incident.id, case.incident.summary.suspects)]

    def _begin(
        self,
        kind: IncidentKind,
        text: str,
        suspects: tuple[str, ...],
        fault_at: float,
        noticed_s: float,
        unix_s: float,
    ) -> _Case:
        summary = IncidentSummary(self._make_id(unix_s), self._job, kind, text, suspects, unix_s, noticed_s)
        case = self._cases[summary.id] = _Case(Incident(summary), fault_at)
        while len(self._cases) > MAX_FOLLOWED:
            del self._cases[next(iter(self._cases))]
        return case

    def _note_action(self, case: _Case, action: str, now: float) -> Changed:
        return Changed(case.note(action=action, acted_s=now - case.fault_at))

    def _drop_if_over(self, case: _Case) -> None:
        if case.is_over:
            self._cases.pop(case.incident.id, None)


def _suspects(verdict: StallVerdict) -> tuple[str, ...]:
    return tuple(map(str, verdict.behind[:MAX_SUSPECTS]))
