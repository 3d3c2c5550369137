"""What failures have cost each job, read at scrape time on the daemon's own loop."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lighthouse.progress.account import JobAccount


class AccountCollector(Collector):
    """`accounts`, by job, and `clock`, that of their moments, are read once a scrape."""

    def __init__(self, accounts: Callable[[], Mapping[str, JobAccount]], clock: Callable[[], float]) -> None:
        self._accounts = accounts
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        accounts, now = self._accounts(), self._clock()
        commits = _counter("lighthouse_commits", "Committed steps, summed over replica groups")
        discards = _counter("lighthouse_discards", "Discarded steps, summed over replica groups, by reason", "reason")
        heals = _counter("lighthouse_heals", "Times that a replica group took over the state of another one")
        heal_bytes = _counter("lighthouse_heal_bytes", "Bytes of the states that healing groups received")
        step_s = _counter("lighthouse_committed_step_seconds", "Time of replica groups in committed steps")
        group_s = _counter("lighthouse_group_seconds", "Time of replica groups since their first quorum")
        goodput = GaugeMetricFamily(
            "lighthouse_goodput_ratio", "Time in committed steps over the time of all replica groups", labels=["job"]
        )
        heal_s = _histogram("lighthouse_heal_seconds", "From the request for a state until it was received")
        waits = _histogram("lighthouse_quorum_wait_seconds", "From a join to its quorum")
        for job, account in accounts.items():
            commits.add_metric([job], account.commits)
            for reason, count in account.discards.items():
                discards.add_metric([job, reason], count)
            heals.add_metric([job], account.heals.count)
            heal_bytes.add_metric([job], account.heal_bytes)
            step_s.add_metric([job], account.ledger.step_s)
            group_s.add_metric([job], account.ledger.group_s(now))
            if (ratio := account.ledger.goodput(now)) is not None:
                goodput.add_metric([job], ratio)
            heal_s.add_metric([job], account.heals.buckets(), account.heals.total)
            waits.add_metric([job], account.waits.buckets(), account.waits.total)
        yield from (commits, discards, heals, heal_bytes, step_s, group_s, goodput, heal_s, waits)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=["job", *labels])


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=["job"])
