"""One job's incidents: the machine is told what happens, evidence is asked for, and what is decided is done."""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lighthouse.incidents.registry import IncidentRegistry
from lighthouse.incidents.rules import machine as incidents
from lighthouse.incidents.rules.evidence_round import WITHIN_S, Asked, EvidenceRound, EvidenceTarget
from lighthouse.incidents.rules.machine import EXIT_KEPT_S, IncidentMachine
from lighthouse.incidents.rules.policy import Decision
from lighthouse.members.rules.events import MemberLost
from lighthouse.members.rules.roster import Member, Roster
from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.evidence import RankEvidence
from lighthouse_protocol.messages.incident import Gathered, Incident
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.progress import GroupView, RankName
from lighthouse_protocol.messages.session import (
    Evidence,
    EvidenceDone,
    EvidenceRequest,
    HeldQuorum,
    KillRequest,
    ToManager,
)
from lighthouse_protocol.messages.status import TimelineKind
from lighthouse_protocol.refusals import LimitReached
from lighthouse_protocol.rules.stall import Kind, StallVerdict
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Reply, Timers
from lighthouse_runtime.process.logs import without_credentials
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer

log = logging.getLogger(__name__)

MAX_ROUNDS = 8


def without_secrets(evidence: RankEvidence) -> RankEvidence:
    """What ranks print may hold credentials; incidents are kept in files and go into bug reports."""
    return replace(
        evidence,
        stacks=without_credentials(evidence.stacks),
        process=without_credentials(evidence.process),
        output=tuple(map(without_credentials, evidence.output)),
    )


class Run(Protocol):
    """A run of the job, whose ranks are judged (runs/driver.py is one)."""

    @property
    def run_id(self) -> str: ...

    @property
    def size(self) -> int:
        """So many ranks are active."""
        ...

    @property
    def steps(self) -> int:
        """It grows with each step of a rank."""
        ...

    def look(self, request: EvidenceRequest, told: Callable[[Evidence | EvidenceDone], None]) -> None: ...


@dataclass(slots=True)
class _OpenRound:
    round: EvidenceRound
    told: Callable[[Gathered], None]
    due_at: float
    limit: DeadlineTimer


class IncidentDriver:
    """`tell` says something to a member, and whether it could; `note` writes a line of the timeline; `is_asked`:
    whether any group waits for a quorum; `wall`: seconds since the epoch; `observed`: groups without Agents; `runs`:
    those that have ranks; `look_again`: whether anything moves, now; `check_lag` calls `was_late` if the process itself
    was held up. Where there is a quorum, its members are followed and asked, not the runs of which they are ranks,
    too."""

    def __init__(
        self,
        job: str,
        roster: Roster,
        registry: IncidentRegistry,
        tell: Callable[[Member, ToManager], bool],
        note: Callable[[TimelineKind, Sequence[str], str], None],
        is_asked: Callable[[], bool],
        timers: Timers,
        wall: Callable[[], float],
        runs: Callable[[], Sequence[Run]] = tuple,
        observed: Callable[[], Iterable[str]] = tuple,
        look_again: Callable[[], None] = lambda: None,
        check_lag: Callable[[], None] = lambda: None,
    ) -> None:
        self._job = job
        self._roster = roster
        self._registry = registry
        self._tell = tell
        self._note = note
        self._is_asked = is_asked
        self._incidents = IncidentMachine(job, registry.policy, registry.archive.make_id)
        self._timers = timers
        self._clock = timers.time
        self._wall = wall
        self._all_runs, self._observed = runs, observed
        self._look_again, self._check_lag = look_again, check_lag
        self._numbers = itertools.count(1)
        self._rounds: dict[int, _OpenRound] = {}
        self._is_closed = False

    # -- what happens

    def was_late(self, by_s: float) -> None:
        """The whole process was held up: what was asked for may have come without being read."""
        for round_ in self._rounds.values():
            round_.due_at += by_s
            round_.limit.set(round_.due_at)

    def session_ended(self, session: int) -> None:
        for number in list(self._rounds):
            self._rounds[number].round.ended(session)
            self._finish_if_complete(number)

    def joined(self, participant: Participant) -> None:
        if self._incidents.is_followed or self._incidents.listens_to(participant):
            now = self._clock()
            self._perform(self._incidents.told(participant.replica_id, participant.distrust, now, self._wall()))
            self._perform(self._incidents.asked(now))
            self._perform(self._incidents.reached(participant.asks_for, participant.seen_quorum_id, now))

    def viewed(self, replica_id: str, view: GroupView) -> None:
        """Where the ranks of the member are."""
        if view.replica_id == replica_id:
            ranks = [rank for rank in view.ranks if rank.sample.rejected is not None]
            name, rejected = (ranks[0].name, ranks[0].sample.rejected) if ranks else (RankName(replica_id, 0), None)
            self._perform(self._incidents.rejected(name, rejected, self._clock(), self._wall()))

    def held(self, held: HeldQuorum) -> None:
        """What a member says that it holds."""
        if self._incidents.is_followed:
            self._perform(self._incidents.reached(held.granted, held.quorum_id, self._clock()))

    def killed(self, replica_id: str, quorum_id: int, why: str) -> None:
        """By a person; a member of that quorum, whether it stands or not."""
        self._perform(self._incidents.killed(replica_id, quorum_id, why, self._clock(), self._wall()))

    def lost(self, loss: MemberLost) -> None:
        """A member of no quorum is no incident."""
        if loss.quorum_id is None:
            return
        self._perform(self._incidents.lost(loss, self._clock(), self._wall(), is_asked=self._is_asked()))

    def formed(self, quorum: Quorum, *, is_new: bool) -> None:
        if self._incidents.awaits_quorum:
            step, names = (
                max(member.asks_for for member in quorum.participants),
                {m.replica_id for m in quorum.participants},
            )
            self._perform(self._incidents.formed(quorum.quorum_id, step, self._clock(), is_new=is_new, members=names))

    def exited(self, replica_id: str, reason: str, evidence: RankEvidence) -> bool:
        """A supervisor reports the end of a process. Whether that belongs, or may belong, to a loss of its group."""
        now, is_member = self._clock(), any(m.replica_id == replica_id for m in self._roster.participants())
        effects = self._incidents.exited(replica_id, reason, evidence, now, self._wall(), is_member=is_member)
        if effects is None:
            return False
        self._perform(effects)
        self._timers.call_later(EXIT_KEPT_S, self._expire)
        return True

    def _expire(self) -> None:
        if not self._is_closed:
            self._perform(self._incidents.expire(self._clock()))

    def said(self, verdict: StallVerdict | None) -> None:
        """A verdict that is new; None: something moves again. That all wait for a quorum is no incident: it is the
        lighthouse that lets them wait, and says why."""
        now = self._clock()
        if verdict is None:
            return self._perform(self._incidents.moved(now))
        if verdict.kind is Kind.WAITING and self._is_asked():
            return None
        step = max([member.step for member in self._members()] or [self._run_steps()])
        return self._perform(self._incidents.stalled(verdict, step, now, self._wall()))

    def run_moved(self) -> None:
        """A rank of a run has said where it is."""
        if self._incidents.is_followed:
            self._perform(self._incidents.reached(self._run_steps(), 0, self._clock()))

    @property
    def _runs(self) -> dict[str, Run]:
        return {} if self._roster.participants() else {run.run_id: run for run in self._all_runs() if run.size}

    def _run_steps(self) -> int:
        return sum(run.steps for run in self._runs.values())

    def received(self, session: Asked, message: Evidence | EvidenceDone) -> None:
        round_ = self._rounds.get(message.number)
        if round_ is None:
            return
        if isinstance(message, Evidence):
            round_.round.took(session, without_secrets(message.rank))
        else:
            round_.round.done(session)
            self._finish_if_complete(message.number)

    # -- evidence

    def gather(self, ranks: Mapping[str, tuple[int, ...]] | None, reply: Reply[Gathered]) -> None:
        """Of these ranks now; None: of all members of the quorum. Raises a refusal."""
        if len(self._rounds) >= MAX_ROUNDS:
            raise LimitReached(f"evidence is being taken {MAX_ROUNDS} times over; ask again in {WITHIN_S:g} s")
        self._begin(EvidenceRound(self._targets()) if ranks is None else self._of(ranks), reply.answer)

    def _of(self, ranks: Mapping[str, tuple[int, ...]]) -> EvidenceRound:
        found = (self._roster.get(name) for name in ranks)
        members = [self._target(member) for member in found if member is not None]
        runs = [EvidenceTarget(run.run_id, run.run_id) for run in self._all_runs() if run.run_id in ranks]
        return EvidenceRound([*runs, *members], ranks=ranks)

    def _targets(self) -> list[EvidenceTarget]:
        members = [self._target(member) for member in self._members()]
        return [*members, *(EvidenceTarget(name, name) for name in self._runs)]

    def _members(self) -> list[Member]:
        """Those that are judged: of the quorum, and those observed."""
        observed = (self._roster.get(name) for name in self._observed())
        return list(dict.fromkeys((*self._roster.participants(), *(one for one in observed if one is not None))))

    def _target(self, member: Member) -> EvidenceTarget:
        session = member.session if member.is_connected else None
        return EvidenceTarget(member.replica_id, session)

    def _begin(self, evidence_round: EvidenceRound, told: Callable[[Gathered], None]) -> None:
        number = next(self._numbers)
        due_at, limit = self._clock() + WITHIN_S, DeadlineTimer(functools.partial(self._tick, number), self._timers)
        limit.set(due_at)
        self._rounds[number] = _OpenRound(evidence_round, told, due_at, limit)
        runs = {run.run_id: run for run in self._all_runs()}
        for question in evidence_round.questions:
            request = EvidenceRequest(number, question.group_ranks)
            member = self._roster.get(question.replica_id)
            if isinstance(question.session, str):
                runs[question.session].look(request, functools.partial(self.received, question.session))
            elif member is None or not self._tell(member, request):
                evidence_round.ended(question.session)
        self._finish_if_complete(number)

    def _tick(self, number: int) -> None:
        self._check_lag()
        round_ = self._rounds.get(number)
        if round_ is not None and self._clock() < round_.due_at:
            round_.limit.set(round_.due_at)
        elif round_ is not None:
            self._finish(number)

    def _finish_if_complete(self, number: int) -> None:
        if self._rounds[number].round.is_complete:
            self._finish(number)

    def _finish(self, number: int) -> None:
        round_ = self._rounds.pop(number)
        round_.limit.cancel()
        round_.told(round_.round.result())

    # -- what the machine wants

    def _perform(self, effects: Sequence[incidents.Effect]) -> None:
        for effect in effects:
            match effect:
                case incidents.Opened(incident):
                    self._registry.opened(incident)
                    self._say_opened(incident)
                case incidents.Changed(incident):
                    self._registry.keep(incident)
                case incidents.Recovered(incident):
                    self._registry.recovered(incident)
                    log.info(
                        "incident %s: recovered: the next step was committed %.2f s after the fault",
                        incident.id,
                        incident.summary.step_s or 0.0,
                        extra=event(
                            "incident_recovered", job=self._job, incident=incident.id, after_s=incident.summary.step_s
                        ),
                    )
                case incidents.EvidenceWanted(id, suspects):
                    self._look_at(id, suspects)
                case incidents.ActionDue(id, decision):
                    self._act(id, decision)

    def _say_opened(self, incident: Incident) -> None:
        summary = incident.summary
        told = event(
            "incident_opened",
            job=self._job,
            incident=summary.id,
            kind=summary.kind.value,
            suspects=list(summary.suspects),
        )
        log.warning("incident %s: %s: %s", summary.id, summary.kind, summary.text, extra=told)
        groups = sorted({name.rpartition("/")[0] or name for name in summary.suspects})
        self._note(TimelineKind.INCIDENT, groups, f"{summary.id}: {summary.kind}")

    def _look_at(self, id: str, suspects: Sequence[str]) -> None:
        began_at = self._clock()

        def told(gathered: Gathered) -> None:
            now = self._clock()
            log.info(
                "incident %s: evidence of %d ranks after %.1f s%s",
                id,
                len(gathered.evidence),
                now - began_at,
                f"; missing: {'; '.join(gathered.missing)}" if gathered.missing else "",
                extra=event("incident_evidence", job=self._job, incident=id, ranks=len(gathered.evidence)),
            )
            if not self._is_closed:
                self._look_again()  # what was so when the evidence was asked for is no reason to kill
            members = {
                member.replica_id: member.participant.group_world_size if member.participant is not None else 1
                for member in self._members()
            } | {name: run.size for name, run in self._runs.items()}
            self._perform(self._incidents.took(id, gathered, members, now))

        self._begin(EvidenceRound(self._targets(), suspects=suspects), told)

    def _act(self, id: str, decision: Decision) -> None:
        if self._is_closed:
            return self._perform(self._incidents.acted(id, "the lighthouse stopped: nothing was done", self._clock()))
        text = decision.text
        if decision.stop:
            text = self._stop(id)
        elif decision.restart:
            text = self._restart(id, decision)
        log.warning(
            "incident %s: %s", id, text, extra=event("incident_action", job=self._job, incident=id, action=text)
        )
        return self._perform(self._incidents.acted(id, text, self._clock()))

    def _stop(self, id: str) -> str:
        text = self._registry.archive.get(id).summary.text
        reason = cut_reason(f"incident {id}: nothing moves: {text}")
        runs = list(self._registry.stop_runs(self._job, reason, f"--on-stall stop-run, incident {id}"))
        if runs:
            return f"stopped the run {', '.join(runs)}"
        members = sorted(member.replica_id for member in self._members())
        return f"killed {', '.join(members)}: the job has no run to stop" + self._kill(members, reason)

    def _restart(self, id: str, decision: Decision) -> str:
        reason, groups = cut_reason(f"incident {id}: {decision.text}"), decision.groups
        killed = [name for name in groups if not self._registry.restart_ranks(self._job, name, groups[name], reason)]
        return f"{'killed' if killed else 'interrupted'} {decision.text}" + self._kill(killed, reason, groups)

    def _kill(self, names: Iterable[str], reason: str, behind: Mapping[str, frozenset[int]] | None = None) -> str:
        """`behind`: for which of their ranks; without it, as a person would."""
        requests = {name: KillRequest(reason, (behind or {}).get(name, frozenset())) for name in names}
        found = {name: self._roster.get(name) for name in requests}
        missed = [n for n, m in found.items() if m is None or not self._tell(m, requests[n])]
        return f"; not notified: {', '.join(missed)}" if missed else ""

    def close(self, reason: str) -> None:
        """What stands still is the next lighthouse's to kill."""
        self._is_closed = True
        self._perform(self._incidents.expire(math.inf))
        for number in list(self._rounds):
            log.info("evidence round %d ended: %s", number, reason, extra=event("evidence_ended", job=self._job))
            self._finish(number)
