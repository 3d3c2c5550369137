"""Eight ranks under two supervisors, 200 drawn events; then the logs are read.

recovery.md: every generation names one member list, numbers rise at every worker, nobody invented one, the training
ended. A seed draws the same events again, though not the same moments.
"""

import importlib.util
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.chaos.cluster import GENERATION, SLOTS, WEIGHTS, Cluster
from tests.processes import PATIENCE_S, eventually

EVENTS = 200
SEED = 7
EVENT_EVERY_S = 0.5
RECOVERS, RECOVERS_WITHIN_S = 0.25, 5.0
"""So often the next event waits until the last ones are mended, or for so long. The others meet a restart half way."""
BOOT_S = 3 * PATIENCE_S


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the store that is killed is torch's")
@pytest.mark.timeout(900)
def test_200_drawn_events(tmp_path: Path):
    with Cluster(tmp_path, SEED) as cluster:
        eventually(cluster.all_run, "all run", BOOT_S)
        happened: Counter[str] = Counter()
        for _ in range(EVENTS):
            happened[cluster.happen()] += 1
            cluster.pass_time(cluster.random.expovariate(1 / EVENT_EVERY_S))
            if cluster.random.random() < RECOVERS:
                cluster.pass_until_all_run(RECOVERS_WITHIN_S)
        cluster.recover()
        eventually(cluster.all_run, "all run again", BOOT_S)
        eventually(cluster.store_serves, "the store is back", BOOT_S)
        assert set(cluster.end().values()) == {0}
        assert len(happened) == len(WEIGHTS)
        check(cluster)


def check(cluster: Cluster) -> None:
    named = read_names(cluster)
    runs: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for slot in range(SLOTS):
        lines = cluster.lines(slot)
        assert lines[-1]["what"] == "is done"
        told = [line for line in lines if line["what"] == "runs"]
        for line in told:
            assert line["number"] in named, f"nobody gave out {line}"
            slots = named[line["number"]]
            assert (line["size"], slots[line["rank"]]) == (len(slots), slot), f"{line} of {slots}"
            runs[line["number"], slot].add(line["incarnation"])
        numbers = [line["number"] for line in told]
        assert numbers == sorted(set(numbers)), f"slot {slot}: numbers do not rise: {numbers}"
    assert all(len(incarnations) == 1 for incarnations in runs.values())
    assert len(named) > EVENTS / 10


def read_names(cluster: Cluster) -> dict[int, tuple[int, ...]]:
    """What the lighthouses have given out: one list a number."""
    named = dict(cluster.named)
    said = [match for log in cluster.logs for match in re.findall(GENERATION, log)]
    for number, slots in [*cluster.named, *((int(n), tuple(map(int, text.split()))) for n, text in said)]:
        assert named.setdefault(number, slots) == slots, f"{number} names {slots} and {named[number]}"
    return named
