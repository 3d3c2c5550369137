"""The plan of `lighthouse chaos`, and the evaluation of its result.

This module does no I/O. `plan` draws faults from a seed. `Watcher` reads from the job's status how fast the job trains
without and with faults, whether the states of its ranks agree, and what each fault has cost. Its method `document`
returns the result for the table and --json.
"""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lighthouse_protocol.messages.chaos import MAX_STOP_S, ON_LINK, FaultKind
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_protocol.messages.status import JobStatus, MemberState
from lighthouse_protocol.refusals import InvalidRequest

NOT_OFFERED = {"clock": "the daemons use monotonic clocks, which nothing can set; the simulator skews them"}
KILLS_OF_GROUPS = 0.25  # share of kills that hit all ranks of a group
SECONDS = {  # shortest and longest duration
    FaultKind.KILL: (0.0, 0.0),
    FaultKind.OOM: (0.0, 0.0),
    FaultKind.STOP: (0.5, MAX_STOP_S),
    FaultKind.CUT: (0.5, 20.0),
    FaultKind.SLOW: (2.0, 20.0),
    FaultKind.NAN: (10.0, 10.0),  # the first gradient within this time
    FaultKind.DISK: (10.0, 60.0),
}
DELAY_S = (0.05, 0.5)
LOSES_GROUP = frozenset({FaultKind.KILL, FaultKind.OOM, FaultKind.STOP, FaultKind.CUT})
WRONG_STATE = (IncidentKind.DIVERGENCE, IncidentKind.NOT_APPLIED)
MAX_DIGESTS = 4096


@dataclass(frozen=True, slots=True)
class Target:
    replica_id: str
    group_rank: int | None = None  # None for the group, or its manager

    def __str__(self) -> str:
        return self.replica_id if self.group_rank is None else f"{self.replica_id}/{self.group_rank}"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    at_s: float  # since the end of the baseline
    kind: FaultKind
    target: Target
    seconds: float = 0.0
    delay_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.target}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


def parse_kinds(text: str) -> tuple[FaultKind, ...]:
    """Parse a comma-separated list of fault kinds. Raise InvalidRequest if one is unknown."""
    names = [name.strip() for name in text.split(",")]
    known = {kind.value for kind in FaultKind}
    for name in names:
        if name in NOT_OFFERED:
            raise InvalidRequest(f"{name} cannot be injected: {NOT_OFFERED[name]}", field="--kinds")
        if name not in known:
            raise InvalidRequest(f"{name!r} is not one of {', '.join(FaultKind)}", field="--kinds")
    return tuple(FaultKind(name) for name in dict.fromkeys(names))


def plan(
    seed: int, kinds: Sequence[FaultKind], mtbf_s: float, duration_s: float, ranks: Sequence[Target]
) -> tuple[PlannedFault, ...]:
    """Draw random faults of `kinds` that hit `ranks` or their whole groups.

    The same arguments give the same plan, whatever the order of `kinds` and `ranks`. All faults begin within
    `duration_s`. The times between them are exponentially distributed, with mean `mtbf_s`.
    """
    draw = random.Random(seed)
    kinds, ranks = sorted(set(kinds)), sorted(set(ranks), key=lambda rank: (rank.replica_id, rank.group_rank or 0))
    faults: list[PlannedFault] = []
    at_s = draw.expovariate(1 / mtbf_s)
    while ranks and at_s < duration_s:
        kind, rank, share = draw.choice(kinds), draw.choice(ranks), draw.random()
        is_of_group = kind in ON_LINK or (kind is FaultKind.KILL and share < KILLS_OF_GROUPS)
        seconds, delay_s = draw.uniform(*SECONDS[kind]), draw.uniform(*DELAY_S)
        target = Target(rank.replica_id) if is_of_group else rank
        faults.append(PlannedFault(at_s, kind, target, seconds, delay_s if kind is FaultKind.SLOW else 0.0))
        at_s += draw.expovariate(1 / mtbf_s)
    return tuple(faults)


def ranks_of(job: JobStatus) -> tuple[Target, ...]:
    """Return the ranks of all groups that are training."""
    groups = [member for member in job.members if member.is_participant]
    return tuple(Target(group.replica_id, rank) for group in groups for rank in range(group.world_size))


def has_others(job: JobStatus, replica_id: str, at_risk: Collection[str] = ()) -> bool:
    """Return whether a group that is neither `replica_id` nor in `at_risk` is training and so holds the model state."""
    safe = {member.replica_id for member in job.members if member.state is MemberState.PARTICIPANT}
    return not safe <= {replica_id, *at_risk}


@dataclass(slots=True)
class Outcome:
    """Effect of a planned fault on the job."""

    fault: PlannedFault
    step: int  # highest step of the job when the fault began
    refused: str = ""  # why the fault was not injected, or why its call failed
    incident: str = ""
    next_commit_s: float | None = None
    is_survived: bool = False  # a later step was committed, and the target's group trains
    is_verified: bool = False  # after that, all groups have compared their states at a later step


class Watcher:
    """Evaluates the polled status of a job, from the start of the baseline to the end of the command.

    Arguments named `now` are monotonic times in seconds.
    """

    def __init__(self, job: JobStatus, now: float) -> None:
        self.job = job
        self.outcomes: list[Outcome] = []
        self.divergences: dict[str, None] = {}  # descriptions, in order
        self._old = {incident.id for incident in job.incidents}
        self._had_exact_data = job.data is None or job.data.is_exact
        self._discards = 0  # since the start
        self.step = _step_of(job)
        self._marks = [(now, self.step, 0)]  # start, end of the baseline, end of the faults
        self._digests: dict[tuple[int, int, int], dict[str, str]] = {}  # by rank, step and quorum; then by group

    @property
    def at_risk(self) -> set[str]:
        """Groups that a fault has hit, and that may be lost even if the status does not show it yet."""
        hit = [each for each in self.outcomes if not each.refused and not each.is_survived]
        return {each.fault.target.replica_id for each in hit if each.fault.kind in LOSES_GROUP}

    def is_settled(self, *, verifies: bool) -> bool:
        """Return whether the job has survived all faults and, if `verifies`, all groups compared states after each."""
        done = [each for each in self.outcomes if not each.refused]
        return all(each.is_survived and (each.is_verified or not verifies) for each in done)

    def mark(self, now: float) -> None:
        """Record the job's progress. Call this at the end of the baseline, and again at the end of the faults."""
        self._marks.append((now, self.step, self._discards))

    def update(self, job: JobStatus) -> None:
        # A lighthouse that has restarted counts from 0, and knows no rank until the groups have connected.
        self._discards += job.discards - (self.job.discards if job.discards >= self.job.discards else 0)
        self.step = _step_of(job) if job.ranks else self.step
        self.job = job
        for incident in job.incidents:
            if incident.kind in WRONG_STATE and incident.id not in self._old:
                self.divergences[f"incident {incident.id}: {incident.kind}: {incident.text}"] = None
        if self._had_exact_data and job.data is not None and not job.data.is_exact:
            self.divergences[f"samples: {job.data}"] = None
        self._compare()
        costs = {incident.id: incident.step_s for incident in job.incidents}
        training = {member.replica_id for member in job.members if member.is_participant}
        compared = dict.fromkeys(training, -1)
        for rank in job.ranks:
            if rank.compared is not None and rank.replica_id in training:
                compared[rank.replica_id] = max(compared[rank.replica_id], rank.compared.step)
        for outcome in self.outcomes:
            outcome.next_commit_s = costs.get(outcome.incident, outcome.next_commit_s)
            is_back = outcome.fault.target.replica_id in training
            outcome.is_survived |= is_back and outcome.next_commit_s is not None
            outcome.is_verified |= outcome.is_survived and is_back and min(compared.values()) > outcome.step

    def _compare(self) -> None:
        """Record groups whose states differ at the same rank, step and quorum, by the digests in the status.

        The status contains only the newest digest of each rank, so digests between two polls are missed.
        """
        for rank in self.job.ranks:
            if (seen := rank.compared) is None:
                continue
            key = rank.group_rank, seen.step, seen.quorum_id
            others = self._digests.setdefault(key, {})
            others[rank.replica_id] = seen.digest
            if len(set(others.values())) > 1:
                text = f"rank {key[0]}, step {key[1]}: the states of {', '.join(sorted(others))} differ"
                self.divergences[text] = None
        while len(self._digests) > MAX_DIGESTS:
            del self._digests[next(iter(self._digests))]

    def document(self, *, verifies: bool, is_complete: bool) -> dict[str, Any]:
        """Return the result for JSON output. `is_complete` is False if a signal has stopped the command early.

        If `verifies`, missing comparisons of the groups' states count as problems.
        """
        (start_at, start, _), (faults_at, begun, before), (ended_at, reached, after) = self._marks[:3]
        base = (begun - start) / (faults_at - start_at) if faults_at > start_at else 0.0
        rate = (reached - begun) / (ended_at - faults_at) if ended_at > faults_at else 0.0
        done = [each for each in self.outcomes if not each.refused]
        lasting = [each for each in done if not each.is_survived] if is_complete else []
        problems = [*self.divergences, *(f"not survived: {each.fault}" for each in lasting)]
        if verifies and not self._digests:
            problems.append("no rank has compared its state: set check_state_every of Agent.from_env above 0")
        elif verifies and is_complete:
            unverified = [each.fault for each in done if each.is_survived and not each.is_verified]
            problems += [f"not verified, as not all groups have compared later states: {fault}" for fault in unverified]
        return {
            "faults": len(done),
            "survived": sum(each.is_survived for each in done),
            "verified": sum(each.is_verified for each in done),
            "refused": [f"{each.fault}: {each.refused}" for each in self.outcomes if each.refused],
            "kinds": {kind: _costs([each for each in done if each.fault.kind is kind]) for kind in _kinds(done)},
            "all": _costs(done),
            "discards": after - before,
            "baseline_steps_per_s": base,
            "steps_per_s": rate,
            "goodput": rate / base if base else None,
            "states_compared": sum(map(len, self._digests.values())),
            "samples": str(self.job.data) if self.job.data is not None else None,
            "problems": problems,
        }


def _step_of(job: JobStatus) -> int:
    return max((rank.step for rank in job.ranks), default=0)


def _kinds(outcomes: Sequence[Outcome]) -> list[FaultKind]:
    return sorted({each.fault.kind for each in outcomes}, key=list(FaultKind).index)


def _costs(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    times = sorted(each.next_commit_s for each in outcomes if each.next_commit_s is not None)
    return {
        "faults": len(outcomes),
        "survived": sum(each.is_survived for each in outcomes),
        "next_commit_median_s": median(times) if times else None,
        "next_commit_p99_s": times[math.ceil(0.99 * len(times)) - 1] if times else None,
    }
