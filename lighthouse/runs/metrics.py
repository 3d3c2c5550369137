"""The metrics of runs, read from their snapshots at scrape time on the daemon's own loop."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lighthouse_protocol.messages.run_status import RankState, RunStatus

_LABELS = ["job", "run"]


class RunCollector(Collector):
    """`snapshot` is called once a scrape: all runs, or those of a job, also without processes at present."""

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
            "How much of a restart budget is used, of the one that is used up the most",
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
