"""What a scrape shows: read from the snapshot at scrape time, on the daemon's own loop.

Labels come from closed sets, the job's name apart; a job that is gone from the snapshot is forgotten here, too.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import grpc
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lighthouse.quorum.rules.verdict import Verdict
from lighthouse_protocol.messages.session import QuorumPhase
from lighthouse_protocol.messages.status import JobStatus, LighthouseStatus, MemberState
from lighthouse_protocol.pb.documented.lighthouse_pb2 import DESCRIPTOR
from lighthouse_protocol.refusals import LighthouseError

METHODS = frozenset(DESCRIPTOR.services_by_name["LighthouseService"].methods_by_name)
REFUSALS = frozenset(cls.__name__ for cls in LighthouseError.__subclasses__())
OTHER = "other"


class Counters:
    """Counts that no snapshot has, and that are of no one job. For one event loop: no locks."""

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter(dict.fromkeys(sorted(REFUSALS), 0))
        self._called: Counter[tuple[str, str]] = Counter({(method, "ok"): 0 for method in sorted(METHODS)})

    def refused(self, error: LighthouseError) -> None:
        """A join, or the hello of a session, was refused."""
        name = type(error).__name__
        self._refused[name if name in REFUSALS else OTHER] += 1

    def called(self, method: str, status: grpc.StatusCode) -> None:
        """A call of the RPC `method` (its bare name) ended with `status`."""
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
    """`snapshot` is called once a scrape; `late_s`: for how long in all the loop was held up; `wall`:
    seconds since the epoch."""

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
            "This host's clock, in seconds since 1970; quorum ids begin with it",
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
    stalled = _gauge("lighthouse_stalled_seconds", "How long no rank has moved; 0 while one does")
    heal_left = _gauge("lighthouse_heal_remaining_bytes", "Bytes that healing replica groups have still to receive")
    heal_rate = _gauge("lighthouse_heal_bytes_per_second", "Rate at which healing replica groups receive state")
    for job in jobs:
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
    return iter((participants, members, steps, stalled, heal_left, heal_rate))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=["job", *labels])


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """(body, content type) of a scrape."""
    return generate_latest(registry), CONTENT_TYPE_LATEST
