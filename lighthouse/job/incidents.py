"""Rules for the incidents of one job: when they begin, what belongs to them, how to react, and when training recovers.

1. A stall is one incident from its verdict until a rank makes progress again. The fault is dated to the last progress.
2. The verdict on a stall requests evidence, and the policy decides when the evidence has arrived. A verdict that names
   other ranks or another cause requests evidence again, up to MAX_LOOKS times, but never after the policy has killed
   or stopped something.
3. The loss of members becomes an incident when a group requests the next quorum, or when one forms. Without such a
   request, the losses are the normal end of training. A request that comes later than UNCONFIRMED_S counts only if it
   is from another member of that quorum. If an operator killed the group, its loss is an incident at once. All losses
   in one quorum are one incident, dated to the last heartbeat of the first lost group. If a member was killed because
   of a stall, its loss belongs to the stall.
4. A group that joins without a valid state (a commit was not applied, or its state differs from its peers') is an
   incident. The group repeats the report in every join until it has healed, but the incident counts once.
5. A step that a group discards because of non-finite gradients is an incident.
6. Ranks that become slow in the same comparison are one incident, until each of them recovers, lacks peers, or its
   group is lost or leaves. A rank is in at most one such incident in SLOW_AGAIN_S. The stacks of up to MAX_SUSPECTS
   ranks are collected after this comparison and the next ones, MAX_LOOKS times. The policy for stalls does not apply.
7. A supervisor's report on a dead process explains the loss of its group, whether it arrives before or after the loss,
   and belongs to that incident. If no loss follows within EXIT_KEPT_S, the report is a separate incident.
8. A fault of `lighthouse chaos` is an incident. Losses of the target during the fault belong to the incident, and its
   cost is then the time until the next step is committed, with or without the target. Steps that were already granted
   do not count.
9. An incident is tracked until a later step is committed, as managers' grants and groups' joins show. A loss is also
   tracked until all lost groups have been in a quorum again. The end of the job ends both.

The module does no I/O, and time is an argument. `EvidenceRound` plans one collection of evidence, `IncidentArchive`
keeps the newest incidents of all jobs, and `incident_of` describes an incident of a run.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeAlias

from lighthouse.job.events import MemberLost
from lighthouse.job.records import Group, RestartRecord, RunName
from lighthouse.job.slow_ranks import SlowRank
from lighthouse_protocol.messages.incident import (
    Gathered,
    Incident,
    IncidentKind,
    IncidentSummary,
    MemberEvidence,
    RankEvidence,
    suspects_first,
)
from lighthouse_protocol.messages.membership import Distrust
from lighthouse_protocol.messages.progress import RankName, RejectedStep
from lighthouse_protocol.refusals import InvalidRequest, UnknownName
from lighthouse_protocol.rules.quorum_change import MAX_LISTED, list_names
from lighthouse_protocol.rules.stall import StallVerdict

LEFT_TO_PEOPLE = "nothing is killed; `lighthouse kill` restarts a group, `lighthouse stop` ends the run"


class OnStall(StrEnum):
    """Policies for stalls (`--on-stall`). `decide` applies them."""

    NOTIFY = "notify"
    RESTART_SUSPECTS = "restart-suspects"
    STOP_RUN = "stop-run"


@dataclass(frozen=True, slots=True)
class Decision:
    """Reaction to a stall: restart the groups of some ranks, stop the whole run, or do neither."""

    text: str  # names the ranks and the reason
    restart: tuple[RankName, ...] = ()
    stop: bool = False

    @property
    def is_final(self) -> bool:
        """True if the reaction kills groups or stops the run. The policy then does nothing else in this incident."""
        return self.stop or bool(self.restart)

    @property
    def groups(self) -> dict[str, frozenset[int]]:
        """Replica groups to restart, each with its ranks that are behind."""
        names = sorted({rank.replica_id for rank in self.restart})
        return {name: frozenset(rank.group_rank for rank in self.restart if rank.replica_id == name) for name in names}


def decide(policy: OnStall, behind: Iterable[RankName], members: Mapping[str, int]) -> Decision:
    """Choose the reaction to a stall.

    - notify: Do nothing.
    - restart-suspects: Kill the replica groups of the ranks that are behind, so that their supervisors restart them.
      Functions in a Wrapper are interrupted instead, and run again in the same processes. Kill nothing if no rank is
      behind (for example if the network failed), or if several groups are training and all of them have ranks that are
      behind. If only one group is training, restart it unless all its ranks are behind.
    - stop-run: Stop the job's run, or kill the job's groups if it has no run.

    Args:
        policy: Value of `--on-stall`.
        behind: Ranks that are behind.
        members: Number of ranks in each replica group that is training.
    """
    match policy:
        case OnStall.NOTIFY:
            return Decision("notified: nothing is killed (--on-stall notify)")
        case OnStall.STOP_RUN:
            return Decision("stop", stop=True)
        case OnStall.RESTART_SUSPECTS:
            return _restart(tuple(sorted(name for name in set(behind) if name.replica_id in members)), members)


def _restart(ranks: tuple[RankName, ...], members: Mapping[str, int]) -> Decision:
    behind = sorted({name.replica_id for name in ranks})
    groups = ", ".join(behind)
    if not behind:
        return Decision(f"no rank is behind: {LEFT_TO_PEOPLE}")
    if len(members) == 1:
        if len(ranks) >= members[groups]:
            return Decision(f"all ranks of {groups} are equally behind: {LEFT_TO_PEOPLE}")
        return Decision(f"{groups}, the only group: {list_names(ranks)} behind", ranks)
    if len(behind) == len(members):
        return Decision(f"all groups have ranks that are behind ({groups}): {LEFT_TO_PEOPLE}")
    return Decision(f"{groups}, whose ranks are behind", ranks)


MAX_LOOKS = 3
MAX_FOLLOWED = 8
UNCONFIRMED_S = 60.0
MAX_NAMED = 16  # losses named in a text
MAX_SUSPECTS = 64
EXIT_KEPT_S = 10.0  # longest time from the report of a dead process to the loss that it explains
MAX_EXITS = 256
MAX_EVIDENCE = 8  # processes of one loss or exit
SLOW_AGAIN_S = 600.0  # shortest time between two incidents of the same slow rank


@dataclass(frozen=True, slots=True)
class Opened:
    incident: Incident


@dataclass(frozen=True, slots=True)
class Changed:
    incident: Incident


@dataclass(frozen=True, slots=True)
class EvidenceWanted:
    """Instruction to collect evidence, by default from all members, and to pass it to `add_evidence`."""

    id: str
    suspects: tuple[str, ...]
    is_of_suspects: bool = False  # True to collect from the suspects only


@dataclass(frozen=True, slots=True)
class ActionDue:
    """Instruction to carry out `decision`, and to pass a description of the result to `record_action`."""

    id: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Recovered:
    """Training has recovered: a step was committed after the fault, and no injected fault is still in progress."""

    incident: Incident


Effect = Opened | Changed | EvidenceWanted | ActionDue | Recovered


@dataclass(slots=True)
class _Case:
    """An incident that may still change, with the data that is needed to detect the recovery."""

    incident: Incident
    fault_at: float
    base: int | None = None
    """Training has recovered once a rank reaches a step above this one. None until the next quorum forms."""
    verdict: StallVerdict | None = None
    looks: int = 0
    is_looking: bool = False
    is_final: bool = False
    killed: frozenset[str] = frozenset()
    losses: "_Lost | None" = None
    is_injected: bool = False  # True if `lighthouse chaos` caused the incident and its fault has not ended
    slow: frozenset[RankName] = frozenset()  # ranks of the incident that are still slow

    def update_summary(self, **changes: object) -> Incident:
        summary = replace(self.incident.summary, **changes)  # pyright: ignore[reportArgumentType]
        self.incident = replace(self.incident, summary=summary)
        return self.incident

    def has_killed(self, replica_id: str) -> bool:
        """Return whether this incident explains a loss of the group: it hit the group, and no new quorum has formed."""
        return replica_id in self.killed and self.incident.summary.quorum_s is None

    @property
    def is_case_over(self) -> bool:
        summary = self.incident.summary
        is_still = summary.kind is IncidentKind.STALL and summary.over_s is None
        is_open = is_still or self.is_looking or self.is_injected
        has_away = self.losses is not None and self.losses.has_away
        return summary.step_s is not None and not is_open and not has_away


@dataclass(slots=True)
class _LostGroup:
    reason: str
    is_explained: bool = False  # a supervisor has reported why a process of the group exited
    is_away: bool = True  # True if the group has not been in a quorum since the loss


@dataclass(slots=True)
class _Lost:
    """Members that a quorum has lost. Their loss is an incident, unless the job is ending normally."""

    first: MemberLost
    noticed_at: float
    noticed_unix_s: float
    groups: dict[str, _LostGroup] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = {self.first.replica_id: _LostGroup(self.first.reason)}

    def add_cause(self, replica_id: str, exit_: "_Exit") -> None:
        """Add the reason why a process in the group has exited. Ignore later exits, which follow from the first."""
        group, rank = self.groups[replica_id], f"rank {exit_.evidence.group_rank}"
        if not group.is_explained:
            cause = exit_.reason if rank in group.reason else f"{rank}: {exit_.reason}"
            group.reason, group.is_explained = f"{group.reason}: {cause}", True

    def has_survivor(self, joined: Mapping[str, int]) -> bool:
        """Return whether one of the groups was in the quorum and is not lost: the job had not ended with the losses.

        Its request may come late, because a rank may be in a long step or a validation. A new process has seen no id.
        """
        quorum_id = self.first.quorum_id or 0
        return any(seen_id >= quorum_id and name not in self.groups for name, seen_id in joined.items())

    @property
    def has_away(self) -> bool:
        return any(group.is_away for group in self.groups.values())

    def is_away(self, replica_id: str) -> bool:
        group = self.groups.get(replica_id)
        return group is not None and group.is_away

    def mark_returned(self, members: Collection[str]) -> bool:
        """Record that a quorum of `members` has formed. Return whether it contains the last of the missing groups."""
        back = [group for name, group in self.groups.items() if group.is_away and name in members]
        for group in back:
            group.is_away = False
        return bool(back) and not self.has_away

    @property
    def loss_text(self) -> str:
        more = f" and {len(self.groups) - MAX_NAMED} more" if len(self.groups) > MAX_NAMED else ""
        named = itertools.islice(self.groups.items(), MAX_NAMED)
        return "; ".join(f"{name}: {group.reason}" for name, group in named) + more

    @property
    def suspects(self) -> tuple[str, ...]:
        return tuple(itertools.islice(self.groups, MAX_SUSPECTS))


@dataclass(frozen=True, slots=True)
class _Exit:
    """A supervisor's report that a process has died. The process's group does not count as lost yet."""

    reason: str
    evidence: RankEvidence
    at: float
    unix_s: float


class IncidentMachine:
    """State machine of one job's incidents. `now` is monotonic time and `unix_s` wall-clock time, both in seconds."""

    def __init__(self, job: str, policy: OnStall, make_id: Callable[[float], str]) -> None:
        self._job = job
        self._policy = policy
        self._make_id = make_id
        self._cases: dict[str, _Case] = {}
        self._stall: _Case | None = None
        self._lost: _Lost | None = None
        self._loss: _Case | None = None  # incident of the losses
        self._exits: dict[str, list[_Exit]] = {}  # by replica_id
        self._slow: dict[str, _Case] = {}  # incidents of slow ranks, by id
        self._slow_opened_at: dict[RankName, float] = {}

    @property
    def is_awaiting_commit(self) -> bool:
        """True if the next committed step may change an incident."""
        return self._lost is not None or any(case.incident.summary.step_s is None for case in self._cases.values())

    @property
    def is_awaiting_quorum(self) -> bool:
        """True if the next quorum may change an incident."""
        return self._lost is not None or bool(self._cases)

    # -- stalls

    def open_or_update_stall(self, verdict: StallVerdict, step: int, now: float, unix_s: float) -> list[Effect]:
        """Open or update the incident of a stall. Training has recovered once a rank reaches a step above `step`."""
        case = self._stall
        if case is None:
            suspects, still_s = _suspects(verdict), verdict.still_s
            case = self._open_case(IncidentKind.STALL, verdict.text, suspects, now - still_s, still_s, unix_s)
            case.verdict, case.base, self._stall = verdict, step, case
            return [Opened(case.incident), *self._request_evidence(case)]
        if case.is_final or verdict.is_same_as(case.verdict):
            return []  # nothing new, or a consequence of the kill
        if case.incident.summary.suspects and not verdict.behind:
            return []  # the earlier suspect is still the cause
        case.verdict = verdict
        changed = Changed(case.update_summary(text=verdict.text, suspects=_suspects(verdict)))
        return [changed, *self._request_evidence(case)]

    def end_stall(self, now: float) -> list[Effect]:
        case, self._stall = self._stall, None
        if case is None:
            return []
        changed = Changed(case.update_summary(over_s=now - case.fault_at))
        self._drop_if_over(case)
        return [changed]

    def add_evidence(self, id: str, gathered: Gathered, members: Mapping[str, int], now: float) -> list[Effect]:
        """Add evidence to an incident. If the incident is the current stall, also choose the reaction to it.

        Args:
            id: Id of the incident.
            gathered: The evidence that arrived in time.
            members: Number of ranks in each replica group that is training.
            now: Current time.
        """
        if (slow := self._slow.get(id)) is not None:
            slow.is_looking = False
            if not slow.slow:
                del self._slow[id]
            evidence = (*slow.incident.evidence, *gathered.evidence)
            slow.incident = replace(slow.incident, evidence=evidence, missing=gathered.missing)
            return [Changed(slow.update_summary(evidence_s=slow.incident.summary.evidence_s or now - slow.fault_at))]
        case = self._cases.get(id)
        if case is None or case.verdict is None:
            return []
        case.is_looking = False
        evidence = suspects_first(gathered.evidence, case.incident.summary.suspects)
        case.incident = replace(case.incident, evidence=evidence, missing=gathered.missing)
        first_s = case.incident.summary.evidence_s
        changed = Changed(case.update_summary(evidence_s=now - case.fault_at if first_s is None else first_s))
        if case is not self._stall:
            done = self._note_action(case, "progress resumed: nothing was done", now)
            self._drop_if_over(case)
            return [changed, done]
        decision = decide(self._policy, case.verdict.behind, members)
        if not decision.is_final and decision.text == case.incident.summary.action:
            return [changed]
        case.is_final, case.killed = decision.is_final, frozenset(members if decision.stop else decision.groups)
        return [changed, ActionDue(id, decision)]

    def record_action(self, id: str, action: str, now: float) -> list[Effect]:
        case = self._cases.get(id)
        return [] if case is None else [self._note_action(case, action, now)]

    # -- losses

    def add_loss(self, loss: MemberLost, now: float, unix_s: float, *, is_asked: bool) -> list[Effect]:
        """Record the loss of a member. Open an incident now if a group is waiting for the next quorum (`is_asked`)."""
        if (injected := self._injected(loss.replica_id)) is not None:
            injected.base, injected.losses = None, injected.losses or _Lost(loss, now, unix_s)
            injected.losses.groups[loss.replica_id] = _LostGroup(loss.reason)
            return [Changed(injected.update_summary(step_s=None, quorum_s=None, quorum_id=0))]
        if any(case.has_killed(loss.replica_id) for case in self._cases.values()):
            return []
        before = self._lost
        if before is None or before.first.quorum_id != loss.quorum_id:
            self._lost, self._loss = _Lost(loss, now, unix_s), None
        elif loss.replica_id in before.groups:
            return []
        else:
            before.groups[loss.replica_id] = _LostGroup(loss.reason)
        lost = self._lost
        assert lost is not None
        exits = self._exits.pop(loss.replica_id, [])
        for each in exits:
            lost.add_cause(loss.replica_id, each)
        if self._loss is not None:
            self._attach_evidence(self._loss, loss.replica_id, exits)
            return [Changed(self._loss.update_summary(text=lost.loss_text, suspects=lost.suspects))]
        if exits:
            self._exits[loss.replica_id] = exits  # evidence for a possible incident
        return self.open_losses(now, {}) if is_asked else []

    def open_kill(self, replica_id: str, quorum_id: int, why: str, now: float, unix_s: float) -> list[Effect]:
        """Open an incident for a member that an operator has killed. The member's loss then belongs to the incident."""
        return self.add_loss(MemberLost(replica_id, quorum_id, f"killed {why}", None), now, unix_s, is_asked=True)

    def open_losses(self, now: float, joined: Mapping[str, int]) -> list[Effect]:
        """Open an incident for losses that have not caused one yet. Call this when groups request the next quorum.

        `joined` contains the highest quorum id that each of these groups has received.
        """
        lost = self._lost
        if lost is None or self._loss is not None:
            return []
        if now - lost.noticed_at > UNCONFIRMED_S and not lost.has_survivor(joined):
            self._lost = None
            return []
        seen_at = lost.first.last_seen_at
        fault_at = lost.noticed_at if seen_at is None else min(seen_at, lost.noticed_at)
        noticed_s = lost.noticed_at - fault_at
        case = self._open_case(
            IncidentKind.LOSS, lost.loss_text, lost.suspects, fault_at, noticed_s, lost.noticed_unix_s
        )
        case.losses, self._loss = lost, case
        for name in lost.groups:
            self._attach_evidence(case, name, self._exits.pop(name, []))
        return [Opened(case.incident)]

    # -- dead processes

    def add_exit_report(
        self, replica_id: str, reason: str, evidence: RankEvidence, now: float, unix_s: float, *, is_member: bool
    ) -> list[Effect] | None:
        """Record a supervisor's report on a dead process.

        Returns:
            The effects, or None if the report is dropped, because its group is neither in the current quorum
            (`is_member`) nor lost, or because MAX_EXITS reports are pending.
        """
        exit_ = _Exit(reason, evidence, now, unix_s)
        if (injected := self._injected(replica_id)) is not None:
            self._attach_evidence(injected, replica_id, [exit_])
            return [Changed(injected.incident)]
        for case in reversed(self._cases.values()):
            is_loss = case.incident.summary.kind is IncidentKind.LOSS
            if is_loss and case.losses is not None and case.losses.is_away(replica_id):
                case.losses.add_cause(replica_id, exit_)
                self._attach_evidence(case, replica_id, [exit_])
                return [Changed(case.update_summary(text=case.losses.loss_text))]
        is_lost = self._lost is not None and replica_id in self._lost.groups
        if is_lost and self._lost is not None:
            self._lost.add_cause(replica_id, exit_)
        if not (is_member or is_lost) or len(self._exits) >= MAX_EXITS:
            return None
        exits = self._exits.setdefault(replica_id, [])
        if len(exits) < MAX_EVIDENCE:
            exits.append(exit_)
        return []

    def open_unexplained_exits(self, now: float) -> list[Effect]:
        """Open incidents for dead processes whose groups were not lost within EXIT_KEPT_S of the report."""
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

    def _attach_evidence(self, case: _Case, replica_id: str, exits: list[_Exit]) -> None:
        evidence = (*case.incident.evidence, *(MemberEvidence(replica_id, each.evidence) for each in exits))
        case.incident = replace(case.incident, evidence=evidence[:MAX_EVIDENCE])

    # -- faults of lighthouse chaos

    def open_fault(self, replica_id: str, text: str, target: str, step: int, now: float, unix_s: float) -> Opened:
        """Open an incident for a fault injected into a group that is working on `step`. The suspect is `target`."""
        case = self._open_case(IncidentKind.CHAOS, text, (target,), now, 0.0, unix_s)
        case.base, case.killed, case.is_injected = step, frozenset({replica_id}), True
        return Opened(case.incident)

    def end_fault(self, id: str) -> list[Effect]:
        case = self._cases.get(id)
        if case is None:
            return []
        case.is_injected = False
        self._drop_if_over(case)
        return [Recovered(case.incident)] if case.incident.summary.step_s is not None else []

    def _injected(self, replica_id: str) -> _Case | None:
        cases = (case for case in reversed(self._cases.values()) if case.is_injected and replica_id in case.killed)
        return next(cases, None)

    # -- groups without a valid state

    def record_distrust(self, group: Group, distrust: Distrust | None, now: float, unix_s: float) -> list[Effect]:
        """Open an incident if a group's join newly reports an invalid state. `distrust` is None for a valid state."""
        before, group.reports.distrust = group.reports.distrust, distrust
        if distrust is None or distrust == before:
            return []
        text = f"{group.replica_id}: {distrust.text}"
        case = self._open_case(IncidentKind(distrust.kind), text, (group.replica_id,), now, 0.0, unix_s)
        return [Opened(case.incident)]

    # -- non-finite gradients

    def record_rejected_step(
        self, group: Group, rank: RankName, rejected: RejectedStep | None, now: float, unix_s: float
    ) -> list[Effect]:
        """Open an incident for a step discarded because of its gradients. Ignore repeated reports of the same step.

        `rejected` is the step that `rank` reports as discarded, or None if the group's ranks report none.
        """
        before, group.reports.rejected_step = group.reports.rejected_step, None if rejected is None else rejected.step
        if rejected is None or rejected.step == before:
            return []
        suspects = (str(rank),) if rejected.is_own else ()
        text = f"{rank}: step {rejected.step} discarded: {rejected.reason}"
        case = self._open_case(IncidentKind.NONFINITE, text, suspects, now, 0.0, unix_s)
        case.base = rejected.step
        return [Opened(case.incident)]

    # -- slow ranks

    def track_slow(self, slow: Mapping[RankName, SlowRank], now: float, unix_s: float) -> list[Effect]:
        """Open an incident for ranks that have become slow, and close incidents whose ranks are no longer slow."""
        open_ = frozenset(name for case in self._slow.values() for name in case.slow)
        effects = self._end_slow(open_ - slow.keys(), now)
        opened_at = {name: at for name, at in self._slow_opened_at.items() if now < at + SLOW_AGAIN_S}
        if new := [name for name in slow if name not in open_ and name not in opened_at]:
            fault_at = min(slow[name].since for name in new)
            text = slow[new[0]].text + (f"; also slow: {list_names(new[1:])}" if new[1:] else "")
            suspects = tuple(map(str, new[:MAX_SUSPECTS]))
            case = self._open_case(IncidentKind.SLOW, text, suspects, fault_at, now - fault_at, unix_s)
            case.slow = frozenset(new)
            effects.append(Opened(case.incident))
        self._slow_opened_at = opened_at | dict.fromkeys(new, now)
        for case in self._slow.values():
            if case.slow:
                effects += self._request_evidence(case)
        return effects

    def end_slow_group(self, replica_id: str, now: float) -> list[Effect]:
        """Stop counting a group's ranks as slow, because the group was lost or has left."""
        names = (name for case in self._slow.values() for name in case.slow if name.replica_id == replica_id)
        return self._end_slow(frozenset(names), now)

    def _end_slow(self, names: Set[RankName], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for case in [case for case in self._slow.values() if case.slow & names]:
            case.slow -= names
            if not case.slow:
                effects.append(Changed(case.update_summary(over_s=now - case.fault_at)))
                if not case.is_looking:  # otherwise `add_evidence` drops the case
                    del self._slow[case.incident.id]
        return effects

    # -- recovery

    def record_new_quorum(
        self, quorum_id: int, step: int, now: float, *, is_new: bool, members: Mapping[str, int]
    ) -> list[Effect]:
        """Record that a quorum has formed at `step`. `is_new` is False if it kept the previous id.

        `members` contains the highest earlier quorum id that each member has received.
        """
        effects = self.open_losses(now, members)
        self._lost = self._loss = None
        effects += self.record_step_reached(step, quorum_id, now)
        for case in self._cases.values():
            if is_new and case.incident.summary.quorum_s is None:
                effects.append(Changed(case.update_summary(quorum_s=now - case.fault_at, quorum_id=quorum_id)))
            if is_new or case.base is None:
                case.base = step
            if case.losses is not None and case.losses.mark_returned(members):
                effects.append(Changed(case.update_summary(back_s=now - case.fault_at)))
        for id in [id for id, case in self._cases.items() if case.is_case_over]:
            del self._cases[id]
        return effects

    def record_step_reached(self, step: int, quorum_id: int, now: float) -> list[Effect]:
        """Record that a rank has reached `step` in this quorum, which shows that all earlier steps are committed."""
        effects: list[Effect] = []
        for case in list(self._cases.values()):
            summary = case.incident.summary
            if case.base is None or step <= case.base or quorum_id < summary.quorum_id or summary.step_s is not None:
                continue
            incident = case.update_summary(step_s=now - case.fault_at)
            effects.append(Changed(incident) if case.is_injected else Recovered(incident))
            self._drop_if_over(case)
        return effects

    def end_job(self, step: int, quorum_id: int, now: float) -> list[Effect]:
        """Record that the job has ended at `step`. The next run with this name recovers from none of its incidents.

        A stall whose evidence is still being collected stays open.
        """
        effects = self.record_step_reached(step, quorum_id, now)
        self._cases = {id: case for id, case in self._cases.items() if case.is_looking}
        self._lost = self._loss = None
        return effects

    # -- internals

    def _request_evidence(self, case: _Case) -> list[Effect]:
        if case.is_looking or case.is_final or case.looks >= MAX_LOOKS:
            return []
        case.is_looking, case.looks = True, case.looks + 1
        summary = case.incident.summary
        return [EvidenceWanted(summary.id, summary.suspects, is_of_suspects=summary.kind is IncidentKind.SLOW)]

    def _open_case(
        self, kind: IncidentKind, text: str, suspects: tuple[str, ...], fault_at: float, noticed_s: float, unix_s: float
    ) -> _Case:
        summary = IncidentSummary(self._make_id(unix_s), self._job, kind, text, suspects, unix_s, noticed_s)
        case = _Case(Incident(summary), fault_at)
        if kind is IncidentKind.SLOW:
            self._slow[summary.id] = case
            return case
        self._cases[summary.id] = case
        while len(self._cases) > MAX_FOLLOWED:  # the policy for stalls still needs the current one
            del self._cases[next(id for id, each in self._cases.items() if each is not self._stall)]
        return case

    def _note_action(self, case: _Case, action: str, now: float) -> Changed:
        return Changed(case.update_summary(action=action, acted_s=now - case.fault_at))

    def _drop_if_over(self, case: _Case) -> None:
        if case.is_case_over:
            self._cases.pop(case.incident.id, None)


def _suspects(verdict: StallVerdict) -> tuple[str, ...]:
    return tuple(map(str, verdict.behind[:MAX_SUSPECTS]))


MAX_ASKED = 64
MAX_EVIDENCE_BYTES = 24 * 1024 * 1024
WITHIN_S = 10.0

Asked: TypeAlias = int | str
"""Number of a manager's session, or the name of a run."""


@dataclass(frozen=True, slots=True)
class Question:
    session: Asked
    replica_id: str
    group_ranks: tuple[int, ...] = ()


class EvidenceRound:
    """One collection of evidence: the managers and runs to ask, their answers, and the missing parts.

    A round asks up to MAX_ASKED replica groups, suspects first, and keeps up to MAX_EVIDENCE_BYTES, so that a large
    job's evidence fits into memory and into one message.
    """

    def __init__(
        self,
        targets: Mapping[str, Asked | None],
        *,
        ranks: Mapping[str, tuple[int, ...]] | None = None,
        suspects: Sequence[str] = (),
    ) -> None:
        """Choose the members and runs to ask.

        Args:
            targets: All members and runs by name. The value is None for a member without a session.
            ranks: Ranks to ask, by replica group, or None for all targets. () stands for all ranks of a group.
            suspects: Names of ranks or groups. These groups, or the groups of these ranks, are asked first.
        """
        self._evidence: list[MemberEvidence] = []
        self._missing: list[str] = []
        self._bytes = 0
        first = {name.rpartition("/")[0] or name for name in suspects}
        wanted = sorted(targets if ranks is None else ranks, key=lambda name: (name not in first, name))
        able: list[Question] = []
        for name in wanted:
            if (session := targets.get(name)) is not None:
                able.append(Question(session, name, (ranks or {}).get(name, ())))
            else:
                self._missing.append(f"{name}: it holds no session with the lighthouse")
        self.questions = tuple(able[:MAX_ASKED])
        self._leave_out([question.replica_id for question in able[MAX_ASKED:]])
        self._waiting = {question.session: question for question in self.questions}

    @property
    def is_complete(self) -> bool:
        return not self._waiting

    def add_rank(self, session: Asked, rank: RankEvidence) -> None:
        question = self._waiting.get(session)
        if question is None:
            return
        self._bytes += size_of(rank)
        if self._bytes > MAX_EVIDENCE_BYTES:
            rank = without_text(rank, f"left out: there is more than {MAX_EVIDENCE_BYTES >> 20} MiB of evidence")
        self._evidence.append(MemberEvidence(question.replica_id, rank))

    def finish_session(self, session: Asked) -> None:
        self._waiting.pop(session, None)

    def drop_session(self, session: Asked) -> None:
        """Record that a session has closed before its answer was complete."""
        if (question := self._waiting.pop(session, None)) is not None:
            self._missing.append(f"{question.replica_id}: its session has ended")

    def gathered(self) -> Gathered:
        """Return the collected evidence, with descriptions of the missing parts."""
        late = [f"{question.replica_id}: no full answer within {WITHIN_S:g} s" for question in self._waiting.values()]
        evidence = sorted(self._evidence, key=lambda one: (one.replica_id, one.rank.group_rank))
        return Gathered(tuple(evidence), (*self._missing, *late))

    def _leave_out(self, names: Sequence[str]) -> None:
        if names:
            shown, more = names[:MAX_LISTED], len(names) - MAX_LISTED
            and_more = f" and {more} more" if more > 0 else ""
            self._missing.append(f"{', '.join(shown)}{and_more}: at most {MAX_ASKED} replica groups are asked")


def size_of(rank: RankEvidence) -> int:
    return sum(map(len, (rank.stacks, rank.flight_recorder, rank.process, *rank.output, *rank.missing)))


def without_text(rank: RankEvidence, why: str) -> RankEvidence:
    return replace(rank, stacks="", flight_recorder="", process="", output=(), missing=(why,))


def read_ranks(names: Iterable[str]) -> dict[str, tuple[int, ...]] | None:
    """Parse names of ranks from a command line. `b/1` is rank 1 of group b, and `b` stands for the whole group.

    Returns:
        Ranks by group, with an empty tuple for a whole group. None if there are no names.

    Raises:
        InvalidRequest: A name is malformed.
    """
    chosen: dict[str, set[int]] = {}
    for name in names:
        group, slash, number = name.rpartition("/")
        if not slash:
            chosen[name] = set()
        elif not number.isdecimal() or len(number) > 5:
            raise InvalidRequest(f"{name!r} is not a rank; write b/1, or b for all of that group", field="rank")
        elif chosen.setdefault(group, {int(number)}):  # an empty set stands for the whole group
            chosen[group].add(int(number))
    return {group: tuple(sorted(ranks)) for group, ranks in chosen.items()} or None


def check_ranks(replica_id: str, ranks: Sequence[int], group_world_size: int) -> None:
    """Raise UnknownName if the group lacks one of `ranks`. Accept all ranks if `group_world_size` is unknown (0)."""
    unknown = [rank for rank in ranks if rank >= group_world_size > 0]
    if unknown:
        last = group_world_size - 1
        has = f"ranks {replica_id}/0 to {replica_id}/{last}" if last else f"rank {replica_id}/0 only"
        raise UnknownName(f"rank: there is no {replica_id}/{unknown[0]}; this group has {has}")


LIMIT = 200
SHOWN = 50
MAX_ARCHIVE_BYTES = 64 * 1024 * 1024
DROPPED = "evidence is kept in memory for newer incidents only"


def surplus(kept: Sequence[tuple[str, str, int]], limit: int, max_bytes: int) -> list[str]:
    """Choose the incidents to drop so that at most `limit` remain, with at most `max_bytes` in total.

    The oldest incident of the largest job is dropped first, so no job displaces other jobs' incidents.

    Args:
        kept: (id, job, size in bytes) of each incident, oldest first.
        limit: Maximum number of incidents.
        max_bytes: Maximum total size. The newest incident is kept, however large.
    """
    by_job: dict[str, list[tuple[str, int]]] = {}
    for id, job, size in kept:
        by_job.setdefault(job, []).append((id, size))
    counts = {job: len(entries) for job, entries in by_job.items()}
    sizes = {job: sum(size for _, size in entries) for job, entries in by_job.items()}
    dropped: list[str] = []
    while (is_over := sum(counts.values()) > limit) or (sum(sizes.values()) > max_bytes and sum(counts.values()) > 1):
        measure = counts if is_over else sizes
        job = max(measure, key=lambda name: measure[name])
        id, size = by_job[job].pop(0)
        counts[job] -= 1
        sizes[job] -= size
        dropped.append(id)
    return dropped


class IncidentArchive:
    """The newest incidents of all jobs, in memory.

    An incident's id is the date and time at which it was noticed, with a number if several have the same time. Evidence
    is kept only for the newest incidents, up to MAX_ARCHIVE_BYTES.
    """

    def __init__(self, incidents: Iterable[Incident] = ()) -> None:
        """Start with the incidents that earlier lighthouses stored."""
        self._by_id: dict[str, Incident] = {}
        self._taken: set[str] = set()
        for incident in sorted(incidents, key=lambda i: (i.summary.opened_unix_s, i.id)):
            self.store_incident(incident)

    def make_id(self, unix_s: float) -> str:
        stem = datetime.fromtimestamp(unix_s, UTC).strftime("%Y%m%d-%H%M%S")
        number = 1
        while (name := stem if number == 1 else f"{stem}-{number}") in self._taken:
            number += 1
        self._taken.add(name)
        return name

    def store_incident(self, incident: Incident) -> None:
        self._by_id[incident.id] = incident
        self._taken.add(incident.id)
        if len(self._by_id) > LIMIT:
            every = [(each.id, each.summary.job, 0) for each in self._by_id.values()]
            for id in surplus(every, LIMIT, 0):
                del self._by_id[id]
                self._taken.discard(id)
        if incident.evidence:
            self._save_memory()

    def find_incident(self, id: str) -> Incident | None:
        return self._by_id.get(id)

    def get_incident(self, id: str) -> Incident:
        """Return an incident. Raise UnknownName if it is not in the archive."""
        incident = self._by_id.get(id)
        if incident is None:
            newest = ", ".join(summary.id for summary in self.summaries()[:8]) or "none"
            raise UnknownName(f"no incident {id!r}; the newest: {newest}")
        return incident

    def summaries(self, job: str = "") -> tuple[IncidentSummary, ...]:
        """Return the incident summaries of `job`, or of all jobs if it is empty, newest first."""
        newest = reversed(self._by_id.values())
        return tuple(incident.summary for incident in newest if job in ("", incident.summary.job))

    def _save_memory(self) -> None:
        left = MAX_ARCHIVE_BYTES
        for incident in reversed(tuple(self._by_id.values())):
            left -= sum(size_of(one.rank) for one in incident.evidence)
            if left < 0 and incident.evidence:
                self._by_id[incident.id] = replace(incident, evidence=(), missing=(*incident.missing, DROPPED))


def incident_of(name: RunName, restart: RestartRecord) -> Incident:
    """Convert a restart of a run to an incident. The lost ranks are named `run/slot`."""
    job, run = name
    kind = IncidentKind.EXIT if restart.ends_nothing else IncidentKind.RESTART
    formed_s = _since(restart, restart.formed_at)
    at = f"run {run}" if restart.ends_nothing else f"run {run}, generation {restart.generation}"
    summary = IncidentSummary(
        restart.incident,
        job,
        kind,
        f"{at}: {restart.cause}",
        tuple(f"{run}/{rank.slot}" for rank in restart.lost),
        opened_unix_s=restart.noticed_at,
        noticed_s=0.0,
        quorum_s=formed_s,
        quorum_id=restart.formed or 0,
        step_s=_since(restart, restart.stepped_at),
        over_s=0.0 if restart.ends_nothing else formed_s,
    )
    return Incident(
        summary,
        tuple(
            MemberEvidence(
                run,
                RankEvidence(
                    process.rank.slot,
                    rank_incarnation=process.rank.incarnation,
                    process=f"ended: {process.reason}",
                    output=process.output,
                ),
            )
            for process in restart.evidence
        ),
    )


def _since(restart: RestartRecord, at: float | None) -> float | None:
    """Return the seconds from the restart until `at`: 0 if the clock was set back, and None if `at` is None."""
    return None if at is None else max(0.0, at - restart.noticed_at)
