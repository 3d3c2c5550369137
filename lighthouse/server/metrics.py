"""Prometheus metrics of the lighthouse.

Each collector reads a snapshot of the status when Prometheus scrapes, on the daemon's event loop. `Counters` counts
what the snapshots do not contain. The number of series is bounded: apart from the names of jobs and runs, all label
values come from fixed sets, and a job's series disappear with the job.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

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

from lighthouse.job.incident_driver import BOUNDS_S, IncidentTimes, JobAccount, Key
from lighthouse.job.records import Verdict
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
    """Counters of the whole lighthouse, not of one job. Not thread-safe."""

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


class LighthouseCollector(Collector):
    """Metrics of jobs, replica groups and the process.

    Args:
        snapshot: Returns the status. Called once per scrape.
        counters: Counters to include.
        late_s: Returns the total time in seconds for which the event loop was paused.
        wall: Returns Unix time in seconds.
    """

    def __init__(
        self,
        snapshot: Callable[[], LighthouseStatus],
        counters: Counters,
        late_s: Callable[[], float] = float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._snapshot = snapshot
        self._counters = counters
        self._late_s = late_s
        self._wall = wall

    def collect(self) -> Iterator[Metric]:
        status = self._snapshot()
        yield GaugeMetricFamily("lighthouse_up", "1 while the lighthouse serves", 1)
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
            self._late_s(),
        )
        yield GaugeMetricFamily(
            "lighthouse_clock_seconds",
            "This host's clock, in seconds since 1970; new quorum ids start from it",
            self._wall(),
        )
        yield from _quorum_families(status.jobs)
        yield from _standing_families(status.jobs)
        yield from _member_families(status.jobs)
        yield from self._counters.collect()


def _quorum_families(jobs: Iterable[JobStatus]) -> Iterator[Metric]:
    ids = _gauge("lighthouse_quorum_id", "Id of the current quorum; 0 before the first")
    ages = _gauge("lighthouse_quorum_age_seconds", "Time since the current membership formed")
    formed = CounterMetricFamily("lighthouse_quorums_formed", "Quorums formed with a new id", labels=["job"])
    rounds = CounterMetricFamily(
        "lighthouse_quorum_rounds", "Quorums sent to members; one per step without a standing quorum", labels=["job"]
    )
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
    recalls = CounterMetricFamily(
        "lighthouse_quorum_recalls", "Standing quorums recalled because a group joins or leaves", labels=["job"]
    )
    revokes = CounterMetricFamily(
        "lighthouse_quorum_revocations", "Standing quorums revoked by a loss or a failed step", labels=["job"]
    )
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


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Return the body and the content type of the response to a scrape."""
    return generate_latest(registry), CONTENT_TYPE_LATEST


_LABELS = ["job", "run"]


class RunCollector(Collector):
    """Metrics of runs. `snapshot` returns all runs, including those without processes. Called once per scrape."""

    def __init__(self, snapshot: Callable[[], Sequence[RunStatus]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        numbers = GaugeMetricFamily(
            "lighthouse_run_generation", "Current generation of the run; -1 before the first", labels=_LABELS
        )
        restarts = CounterMetricFamily("lighthouse_run_restarts", "Generations that an incident ended", labels=_LABELS)
        ranks = GaugeMetricFamily("lighthouse_run_ranks", "Ranks of the run, by state", labels=[*_LABELS, "state"])
        supervisors = GaugeMetricFamily(
            "lighthouse_run_supervisors", "Connected supervisors of the run", labels=_LABELS
        )
        stopped = GaugeMetricFamily("lighthouse_run_stopped", "1 while the run is stopped", labels=_LABELS)
        budgets = GaugeMetricFamily(
            "lighthouse_run_restart_budget_used_ratio",
            "Used fraction of the restart budget that is closest to exhaustion",
            labels=_LABELS,
        )
        for run in self._snapshot():
            labels = [run.job, run.run]
            numbers.add_metric(labels, run.counters.number)
            restarts.add_metric(labels, run.counters.job_restarts)
            states = Counter(rank.state for rank in run.ranks)
            for state in RankState:
                ranks.add_metric([*labels, state.value], states[state])
            supervisors.add_metric(labels, sum(supervisor.is_connected for supervisor in run.supervisors))
            stopped.add_metric(labels, run.stop is not None)
            budgets.add_metric(labels, run.budget_used)
        yield from (numbers, restarts, ranks, supervisors, stopped, budgets)


class IncidentCollector(Collector):
    """Number of incidents, time to detect them, and time until training recovered.

    `jobs` returns the jobs whose series start at zero before their first incident, because Prometheus computes an
    increase only for a counter that it has already seen.
    """

    def __init__(self, times: IncidentTimes, jobs: Callable[[], Iterable[str]] = tuple) -> None:
        self._times = times
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        times, keys = self._times, [(job, kind) for job in self._jobs() for kind in IncidentKind]
        opened = CounterMetricFamily("lighthouse_incidents", "Incidents, by kind", labels=["job", "kind"])
        for job, kind in dict.fromkeys([*keys, *times.opened]):
            opened.add_metric([job, kind.value], times.opened.get((job, kind), 0))
        yield opened
        yield _family(
            "lighthouse_incident_detection_seconds",
            "Time from a fault until the lighthouse detects it",
            times.detect,
            keys,
        )
        yield _family(
            "lighthouse_incident_recovery_seconds",
            "Time from a fault to the first step that is committed after it",
            times.recover,
            keys,
        )


def _family(name: str, text: str, times: Mapping[Key, Histogram], keys: Collection[Key]) -> Metric:
    family, none = HistogramMetricFamily(name, text, labels=["job", "kind"]), Histogram(BOUNDS_S)
    for job, kind in dict.fromkeys([*keys, *times]):
        histogram = times.get((job, kind), none)
        family.add_metric([job, kind.value], histogram.buckets(), histogram.total)
    return family


class PhaseCollector(Collector):
    """Time that ranks have spent in each phase.

    `seconds` returns, by job and phase, the total over all present and former ranks. Called once per scrape.
    """

    def __init__(self, seconds: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "lighthouse_rank_phase_seconds",
            "Time that ranks spent in each phase that scripts name; `step` is the time outside all phases",
            labels=["job", "phase"],
        )
        for job, phases in self._seconds().items():
            for phase, seconds in sorted(phases.items()):
                family.add_metric([job, phase], seconds)
        yield family


class AccountCollector(Collector):
    """Metrics of the cost of failures: discarded steps, heals, waits and goodput.

    `accounts` returns the account of each job. `clock` returns the current time of the clock that the accounts use.
    """

    def __init__(self, accounts: Callable[[], Mapping[str, JobAccount]], clock: Callable[[], float]) -> None:
        self._accounts = accounts
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        accounts, now = self._accounts(), self._clock()
        commits = _counter("lighthouse_commits", "Committed steps, summed over replica groups")
        discards = _counter("lighthouse_discards", "Discarded steps, summed over replica groups, by reason", "reason")
        heals = _counter("lighthouse_heals", "Number of times that a replica group copied the state of another one")
        heal_bytes = _counter("lighthouse_heal_bytes", "Bytes of the states that healing groups received")
        step_s = _counter("lighthouse_committed_step_seconds", "Time that replica groups spent in committed steps")
        group_s = _counter("lighthouse_group_seconds", "Time since each replica group's first quorum, summed")
        goodput = GaugeMetricFamily(
            "lighthouse_goodput_ratio", "Time in committed steps over the time of all replica groups", labels=["job"]
        )
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


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=["job", *labels])


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=["job"])


class LeadershipCollector(Collector):
    """Metrics of leader election.

    `status` returns None if there is no shared store. This lighthouse then always counts as the leader.
    """

    def __init__(self, status: Callable[[], CandidateStatus | None]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        leads = status is None or status.role is Role.LEADING
        yield GaugeMetricFamily("lighthouse_leader", "1 if this lighthouse leads, 0 if it follows", float(leads))
        yield GaugeMetricFamily(
            "lighthouse_store_available",
            "0 while the shared store does not answer this lighthouse",
            float(status is None or not status.store_error),
        )
        yield GaugeMetricFamily(
            "lighthouse_leader_term",
            "Term in which this lighthouse last led; 0 if none",
            float(status.term if status else 0),
        )
