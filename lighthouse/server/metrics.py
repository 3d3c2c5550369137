"""Prometheus metrics of the lighthouse.

A `Scrape` contains the values of all metrics. The daemon creates one for each scrape, on its event loop. `Counters`
counts events that the status does not contain. The number of series is bounded: apart from the names of jobs and runs,
all label values come from fixed sets, and a job's series disappear with the job.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lighthouse.job.incident_driver import BOUNDS_S, IncidentTimes, JobAccount
from lighthouse.job.records import Verdict
from lighthouse.job.slow_ranks import Slowness
from lighthouse.store.leadership import CandidateStatus, Role
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_protocol.messages.run import RankState, RunStatus
from lighthouse_protocol.messages.session import QuorumPhase
from lighthouse_protocol.messages.status import JobStatus, LighthouseStatus, MemberState
from lighthouse_protocol.pb.documented.lighthouse_pb2 import DESCRIPTOR
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.histogram import Histogram

METHODS = frozenset(DESCRIPTOR.services_by_name["LighthouseService"].methods_by_name)
REFUSALS = frozenset(cls.__name__ for cls in LighthouseError.__subclasses__())
OTHER = "other"


class Counters:
    """Counters of the lighthouse's refusals and calls, over all jobs. Not thread-safe."""

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter(dict.fromkeys(sorted(REFUSALS), 0))
        self._called: Counter[tuple[str, str]] = Counter({(method, "ok"): 0 for method in sorted(METHODS)})

    def refused(self, error: LighthouseError) -> None:
        """Count a refused join or session."""
        name = type(error).__name__
        self._refused[name if name in REFUSALS else OTHER] += 1

    def called(self, method: str, status: grpc.StatusCode) -> None:
        """Count a completed RPC. `method` is its name without the service."""
        self._called[method if method in METHODS else OTHER, status.name.lower()] += 1

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily("lighthouse_join_refusals", "Refused joins, by reason", labels=["reason"])
        for error, count in self._refused.items():
            refused.add_metric([error], count)
        yield refused
        called = CounterMetricFamily(
            "lighthouse_grpc_calls", "Completed gRPC calls, by status code", labels=["method", "code"]
        )
        for labels, count in self._called.items():
            called.add_metric(labels, count)
        yield called


@dataclass(frozen=True, slots=True, eq=False)
class Scrape(Collector):
    """Values of all metrics at the time of a scrape."""

    status: LighthouseStatus
    counters: Counters = field(default_factory=Counters)
    loop_late_s: float = 0.0  # total time for which the event loop was paused
    runs: Sequence[RunStatus] = ()  # including runs without processes
    accounts: Mapping[str, JobAccount] = field(default_factory=dict)
    now: float = 0.0  # on the clock of the accounts
    phase_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # per job and phase, with former ranks
    slowness: Mapping[str, Sequence[Slowness]] = field(default_factory=dict)  # per job, one for each rank
    incidents: IncidentTimes = field(default_factory=IncidentTimes)
    candidate: CandidateStatus | None = None  # None without a shared store

    def collect(self) -> Iterator[Metric]:
        status = self.status
        yield GaugeMetricFamily("lighthouse_up", "1 while the lighthouse is serving", 1)
        yield InfoMetricFamily("lighthouse", "The lighthouse's version", {"version": status.version})
        yield GaugeMetricFamily("lighthouse_uptime_seconds", "Time since the lighthouse started", status.uptime_s)
        yield GaugeMetricFamily(
            "lighthouse_insecure",
            "1 if other hosts reach the lighthouse without TLS",
            int(status.insecure),
        )
        yield CounterMetricFamily(
            "lighthouse_loop_late_seconds",
            "Time for which the process was paused, in pauses of 0.75 s or more",
            self.loop_late_s,
        )
        yield GaugeMetricFamily(
            "lighthouse_clock_seconds",
            "This host's clock, in seconds since 1970; new quorum ids start from it",
            time.time(),
        )
        yield from _quorum_families(status.jobs)
        yield from _standing_families(status.jobs)
        yield from _member_families(status.jobs)
        yield from self.counters.collect()
        yield from _account_families(self.accounts, self.now)
        yield from _run_families(self.runs)
        yield _phase_family(self.phase_s)
        yield from _slow_families(self.slowness)
        yield from _leadership_families(self.candidate)
        jobs = dict.fromkeys((*(job.job for job in status.jobs), *(run.job for run in self.runs)))
        yield from _incident_families(self.incidents, jobs)


def render(scrape: Scrape) -> tuple[bytes, str]:
    """Return the body and the content type of the response to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(scrape)
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _quorum_families(jobs: Iterable[JobStatus]) -> Iterator[Metric]:
    ids = _gauge("lighthouse_quorum_id", "Id of the current quorum; 0 before the first")
    ages = _gauge("lighthouse_quorum_age_seconds", "Time since the current membership formed")
    formed = _counter("lighthouse_quorums_formed", "Quorums formed with a new id")
    rounds = _counter("lighthouse_quorum_rounds", "Quorums sent to members; one per step without a standing quorum")
    verdicts = _gauge(
        "lighthouse_quorum_verdict", "1 for the reason why there is or is not a quorum, 0 for the others", "verdict"
    )
    for job in jobs:
        ids.add_metric([job.job], job.quorum_id)
        if job.quorum_id:
            ages.add_metric([job.job], job.quorum_age_s)
        formed.add_metric([job.job], job.quorums_formed)
        rounds.add_metric([job.job], job.rounds)
        for verdict in Verdict:
            verdicts.add_metric([job.job, verdict.value], job.verdict == verdict)
    return iter((ids, ages, formed, rounds, verdicts))


def _standing_families(jobs: Iterable[JobStatus]) -> Iterator[Metric]:
    phases = _gauge("lighthouse_quorum_phase", "1 for the phase of the standing quorum, 0 for the others", "phase")
    sessions = _gauge("lighthouse_sessions", "Open sessions of managers")
    recalls = _counter("lighthouse_quorum_recalls", "Standing quorums recalled because a group joins or leaves")
    revokes = _counter("lighthouse_quorum_revocations", "Standing quorums revoked by a loss or a failed step")
    for job in jobs:
        for phase in QuorumPhase:
            phases.add_metric([job.job, phase.value], job.phase == phase)
        sessions.add_metric([job.job], job.sessions)
        recalls.add_metric([job.job], job.recalls)
        revokes.add_metric([job.job], job.revokes)
    return iter((phases, sessions, recalls, revokes))


def _member_families(jobs: Iterable[JobStatus]) -> Iterator[Metric]:
    participants = _gauge("lighthouse_participants", "Replica groups in the current quorum")
    members = _gauge("lighthouse_members", "Replica groups known, by state", "state")
    steps = _gauge("lighthouse_quorum_step", "The highest step among the participants")
    stalled = _gauge(
        "lighthouse_stalled_seconds", "Time for which a stalled job has made no progress; 0 if not stalled"
    )
    heal_left = _gauge("lighthouse_heal_remaining_bytes", "Bytes that healing replica groups still have to receive")
    heal_rate = _gauge("lighthouse_heal_bytes_per_second", "Rate at which healing replica groups receive state")
    preempted = _gauge("lighthouse_members_preempted", "Replica groups with a notice that a host will be taken away")
    for job in jobs:
        preempted.add_metric([job.job], sum(member.preemption is not None for member in job.members))
        stalled.add_metric([job.job], job.stall_s if job.stall else 0.0)
        heals = [member.heal for member in job.members if member.heal is not None]
        heal_left.add_metric([job.job], sum(heal.total - heal.received for heal in heals if heal.total is not None))
        heal_rate.add_metric([job.job], sum(heal.bytes_per_s or 0 for heal in heals))
        training = [member.step for member in job.members if member.is_participant]
        states = Counter(member.state for member in job.members)
        participants.add_metric([job.job], len(training))
        steps.add_metric([job.job], max(training, default=0))
        for state in MemberState:
            members.add_metric([job.job, state.value], states[state])
    return iter((participants, members, steps, stalled, heal_left, heal_rate, preempted))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=["job", *labels])


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=["job", *labels])


def _histogram(name: str, text: str, *labels: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=["job", *labels])


def _run_families(runs: Sequence[RunStatus]) -> Iterator[Metric]:
    numbers = _gauge("lighthouse_run_generation", "Current generation of the run; -1 before the first", "run")
    restarts = _counter("lighthouse_run_restarts", "Generations that an incident ended", "run")
    ranks = _gauge("lighthouse_run_ranks", "Ranks of the run, by state", "run", "state")
    supervisors = _gauge("lighthouse_run_supervisors", "Connected supervisors of the run", "run")
    stopped = _gauge("lighthouse_run_stopped", "1 while the run is stopped", "run")
    budgets = _gauge(
        "lighthouse_run_restart_budget_used_ratio",
        "Used fraction of the restart budget that is closest to exhaustion",
        "run",
    )
    for run in runs:
        labels = [run.job, run.run]
        numbers.add_metric(labels, run.counters.number)
        restarts.add_metric(labels, run.counters.job_restarts)
        states = Counter(rank.state for rank in run.ranks)
        for state in RankState:
            ranks.add_metric([*labels, state.value], states[state])
        supervisors.add_metric(labels, sum(supervisor.is_connected for supervisor in run.supervisors))
        stopped.add_metric(labels, run.stop is not None)
        budgets.add_metric(labels, run.budget_used)
    return iter((numbers, restarts, ranks, supervisors, stopped, budgets))


def _incident_families(times: IncidentTimes, jobs: Collection[str]) -> Iterator[Metric]:
    """Return counters of incidents, and histograms of the times to detect them and to recover from them.

    The series of `jobs` start at zero before the first incident, because Prometheus can compute an increase only for a
    series that already exists. `times` may contain former jobs, which have no series until they return.
    """
    keys = [(job, kind) for job in jobs for kind in IncidentKind]
    opened = _counter("lighthouse_incidents", "Incidents, by kind", "kind")
    for job, kind in keys:
        opened.add_metric([job, kind.value], times.opened.get((job, kind), 0))
    detected = _histogram(
        "lighthouse_incident_detection_seconds", "Time from a fault until the lighthouse detects it", "kind"
    )
    recovered = _histogram(
        "lighthouse_incident_recovery_seconds", "Time from a fault to the first step that is committed after it", "kind"
    )
    for family, histograms in ((detected, times.detect), (recovered, times.recover)):
        for job, kind in keys:
            histogram = histograms.get((job, kind)) or Histogram(BOUNDS_S)
            family.add_metric([job, kind.value], histogram.buckets(), histogram.total)
    return iter((opened, detected, recovered))


def _phase_family(seconds: Mapping[str, Mapping[str, float]]) -> Metric:
    family = _counter(
        "lighthouse_rank_phase_seconds",
        "Time that ranks spent in each phase that scripts name; `step` is the time outside all phases",
        "phase",
    )
    for job, phases in seconds.items():
        for phase, phase_s in sorted(phases.items()):
            family.add_metric([job, phase], phase_s)
    return family


def _slow_families(slowness: Mapping[str, Sequence[Slowness]]) -> Iterator[Metric]:
    slow = _gauge("lighthouse_slow_ranks", "Ranks that compute much longer than their peers")
    highest = _gauge(
        "lighthouse_rank_compute_ratio_max",
        "Compute time of a rank over the median of its peers: the highest of all ranks",
        "window",
    )
    for job, ranks in slowness.items():
        slow.add_metric([job], sum(rank.is_slow for rank in ranks))
        highest.add_metric([job, "1m"], max((rank.ratio_1m or 0.0 for rank in ranks), default=0.0))
        highest.add_metric([job, "10m"], max((rank.ratio_10m or 0.0 for rank in ranks), default=0.0))
    return iter((slow, highest))


def _account_families(accounts: Mapping[str, JobAccount], now: float) -> Iterator[Metric]:
    """Yield the metrics of each job's training and of the cost of failures: steps, heals, waits and goodput."""
    commits = _counter("lighthouse_commits", "Committed steps, summed over replica groups")
    discards = _counter("lighthouse_discards", "Discarded steps, summed over replica groups, by reason", "reason")
    heals = _counter("lighthouse_heals", "Number of times that a replica group copied the state of another one")
    heal_bytes = _counter("lighthouse_heal_bytes", "Bytes of the states that healing groups received")
    step_s = _counter("lighthouse_committed_step_seconds", "Time that replica groups spent in committed steps")
    group_s = _counter("lighthouse_group_seconds", "Time since each replica group's first quorum, summed")
    goodput = _gauge("lighthouse_goodput_ratio", "Time in committed steps over the time of all replica groups")
    heal_s = _histogram("lighthouse_heal_seconds", "Time from the request for a state until it was received")
    waits = _histogram("lighthouse_quorum_wait_seconds", "Time from a join to its quorum")
    for job, account in accounts.items():
        commits.add_metric([job], account.commits)
        for reason, count in account.discards.items():
            discards.add_metric([job, reason], count)
        heals.add_metric([job], account.heals.count)
        heal_bytes.add_metric([job], account.heal_bytes)
        step_s.add_metric([job], account.step_s)
        group_s.add_metric([job], account.group_s(now))
        if (ratio := account.goodput(now)) is not None:
            goodput.add_metric([job], ratio)
        heal_s.add_metric([job], account.heals.buckets(), account.heals.total)
        waits.add_metric([job], account.waits.buckets(), account.waits.total)
    yield from (commits, discards, heals, heal_bytes, step_s, group_s, goodput, heal_s, waits)


def _leadership_families(candidate: CandidateStatus | None) -> Iterator[Metric]:
    """Yield the metrics of leader election. A lighthouse without a shared store has no candidate and always leads."""
    leads = candidate is None or candidate.role is Role.LEADING
    yield GaugeMetricFamily("lighthouse_leader", "1 if this lighthouse leads, 0 if it follows", float(leads))
    yield GaugeMetricFamily(
        "lighthouse_store_available",
        "0 while the shared store does not answer this lighthouse, or does not let it lead",
        float(candidate is None or not candidate.store_error),
    )
    yield GaugeMetricFamily(
        "lighthouse_leader_term",
        "Term in which this lighthouse last led; 0 if none",
        float(candidate.term if candidate is not None else 0),
    )
