"""Compare the sums of `lighthouse report` with the clock, in a job whose faults are known.

The daemons are real. Three groups of one rank process without torch train in steps of 20 ms. The benchmark reads the
report, then several times kills a group at a known moment, starts it again after AWAY_S and waits until all groups
train, and reads the report again. All groups exist in between, so their causes must have grown by the time between the
two reports, times the number of groups. The victim's time outside the quorum or healing must have grown by the time
from each kill to its next commit.
"""

import json
import signal
import subprocess
import sys
import time
from typing import Any

import click

from benchmarks.support.children import ROOT, Children
from benchmarks.support.cluster import NAMES, Cluster
from benchmarks.support.daemons import OURS
from benchmarks.support.figures import Bar, Measured, benchmark, table
from lighthouse_runtime.process.commands import START_LIGHTHOUSE

VICTIM = NAMES[-1]
AWAY_S = 2.0
ABSENT = ("down", "restart", "idle", "heal")


def read_report(address: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", START_LIGHTHOUSE, "report", address, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def lose(cluster: Cluster) -> tuple[float, float]:
    """Kill the victim, and start it again. Return the Unix time of the kill, and the seconds until its next commit."""
    struck_at, struck_unix_s = time.monotonic(), time.time()
    cluster.groups[VICTIM].signal(signal.SIGKILL)
    time.sleep(AWAY_S)
    cluster.replace(VICTIM)
    return struck_unix_s, cluster.groups[VICTIM].commits(struck_at)[0].at - struck_at


def measure(faults: int) -> dict[str, Any]:
    with Children() as children:
        cluster = Cluster(children, OURS, 5.0)
        cluster.wait_training()
        first = read_report(cluster.lighthouse.address)
        losses = [lose(cluster) for _ in range(faults)]
        last = read_report(cluster.lighthouse.address)
    moments = sorted(fault["opened_unix_s"] - fault["noticed_s"] for fault in last["faults"])
    apart = [abs(moment - at) for moment, (at, _) in zip(moments, losses, strict=False)]
    spent = {cause: last["by_group"][VICTIM][cause] - first["by_group"][VICTIM][cause] for cause in last["seconds"]}
    return {
        "faults": faults,
        "faults_found": len(moments),
        "fault_apart_s": max(apart, default=0.0),
        "expected_s": len(NAMES) * (last["until_unix_s"] - first["until_unix_s"]),
        "sum_s": sum(last["seconds"].values()) - sum(first["seconds"].values()),
        "absent_s": sum(took_s for _, took_s in losses),
        "absent_found_s": sum(spent[cause] for cause in ABSENT),
        "victim_s": spent,
    }


def error_of(row: dict[str, Any]) -> float:
    """Return by how much the sums differ from the clock, in percent."""
    return abs(row["sum_s"] - row["expected_s"]) / row["expected_s"] * 100


def render(row: dict[str, Any]) -> str:
    header = ["", "clock", "report"]
    rows = [
        ["kills of a group", str(row["faults"]), str(row["faults_found"])],
        ["seconds of 3 groups", f"{row['expected_s']:.3f}", f"{row['sum_s']:.3f}"],
        ["seconds from the kills to the next commits", f"{row['absent_s']:.2f}", f"{row['absent_found_s']:.2f}"],
    ]
    return table(header, rows)


@benchmark("One kill instead of five.")
def main(quick: bool) -> Measured:
    """Compare the sums of `lighthouse report` with the clock."""
    row = measure(1 if quick else 5)
    bars = [
        Bar("sums, difference from the clock", error_of(row), 0.1, "%"),
        Bar("faults that were missed or invented", abs(row["faults_found"] - row["faults"]), 0),
    ]
    click.echo(f"furthest fault from its kill: {row['fault_apart_s'] * 1e3:.0f} ms")
    return render(row), bars, {"results": [row]}


if __name__ == "__main__":
    main()
