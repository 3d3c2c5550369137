"""Measure how long a restart of training takes.

In process: one of four ranks of plain DDP over gloo raises. The time ends with the first step of all ranks. The same
script runs under the decorator and under torchrun, which restarts all processes. In a second test, one of two ranks of
a replica group with an Agent raises while a peer group continues. The time ends with the first commit of both groups.

As processes: one of two ranks of a supervised group is killed, both restart and get a quorum. The ranks run without
torch (support/restarting_rank.py), under one `lighthouse-manager run` with the smallest restart delay. The results
are the time from the kill to the quorum of both ranks, and the age of the slower rank's process at that point.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import OURS, start_lighthouse, start_supervisor
from benchmarks.support.figures import Bar, Measured, benchmark, spread, table
from examples.ports import free_port

DDP_RANKS = 4
GROUP_RANKS = 2
RANKS = 2
DELAY = "1ms"
NVRX_S = {"torch's destroy_process_group": 0.5, "last_call_wait": 1.0, "rank assignment": 0.5}
"""Minimum seconds of NVIDIA's resiliency extension, from "Restart latency" in its usage guide, with the default of
`last_call_wait`. Its barrier (0.5 s with 16,000 ranks), running CUDA kernels and the function's own work are extra.
Source: github.com/NVIDIA/nvidia-resiliency-ext at commit d8686d9 (after 0.7.0), docs/source/inprocess/usage_guide.rst,
and src/nvidia_resiliency_ext/inprocess/wrap.py for the default."""
BAR_S = 1.0
GROUP_BAR_S = 2.0
GROWTH_BAR = 1.05


@dataclass(frozen=True, slots=True)
class Restart:
    """Times until the quorum after a restart."""

    whole_s: float  # from the kill
    from_start_s: float  # from the start of the slower process


def ages(lines: Iterator[str], attempt: int) -> list[float]:
    """Return the ages of both ranks' processes when they had their quorum."""
    found: dict[str, float] = {}
    for line in lines:
        words = line.split()
        if words[1:3] == ["quorum", str(attempt)]:
            found[words[3]] = float(words[4])
        if len(found) == RANKS:
            return list(found.values())
    raise click.ClickException("the supervisor has ended")


def rank_below(pid: int) -> int:
    """Return the pid of a rank, a child of the guard."""
    (guard,) = _children(pid)
    return _children(guard)[-1]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def measure(children: Children, runs: int) -> list[Restart]:
    lighthouse = start_lighthouse(children, OURS, min_replicas=1)
    options = ["--store", "127.0.0.1:1", "--max-restarts", str(runs + 1), "--max-startup-failures", "0"]
    options += ["--restart-delay", DELAY, "--max-restart-delay", DELAY]
    script = ["benchmarks.support.restarting_rank"]
    group = start_supervisor(children, lighthouse, "a", RANKS, options, script)
    lines = group.lines()
    ages(lines, 0)
    restarts: list[Restart] = []
    for attempt in range(1, runs + 1):
        killed_at = time.monotonic()
        os.kill(rank_below(group.pid), signal.SIGKILL)
        found = ages(lines, attempt)
        restarts.append(Restart(time.monotonic() - killed_at, max(found)))
    return restarts


@dataclass(frozen=True, slots=True)
class Comeback:
    """Restarts in one job.

    `after_s` has the seconds from each fault to the end of the first step of all ranks. `threads` and `resident_kib`
    are maxima over the ranks, in the second run of the function and in the last.
    """

    after_s: list[float]
    threads: tuple[int, int]
    resident_kib: tuple[int, int]

    @property
    def growth(self) -> float:
        return self.resident_kib[1] / self.resident_kib[0]


def in_process(children: Children, faults: int) -> Comeback:
    lighthouse = start_lighthouse(children, OURS, min_replicas=1)
    script = ["benchmarks.support.failing_ddp", "in-process", str(faults)]
    options = ["--observe", "off", "--store", "127.0.0.1:1"]
    ranks = start_supervisor(children, lighthouse, "ddp", DDP_RANKS, options, script)
    return comeback(ranks.lines(), faults, DDP_RANKS)


def in_a_group(children: Children, faults: int) -> Comeback:
    lighthouse = start_lighthouse(children, OURS, min_replicas=1)
    groups: list[Child] = []
    for name, count in (("fails", faults), ("peer", 0)):
        ports = ["--master-port", str(free_port()), "--store-port", str(free_port())]
        script = ["benchmarks.support.failing_group", str(count)]
        groups.append(start_supervisor(children, lighthouse, name, GROUP_RANKS, ports, script))
    return comeback(groups[0].lines(), faults, GROUP_RANKS)


def by_torchrun(children: Children, faults: int) -> Comeback:
    options = ["--standalone", f"--nproc-per-node={DDP_RANKS}", f"--max-restarts={faults}"]
    script = ["-m", "benchmarks.support.failing_ddp", "processes", str(faults)]
    # Without it torchrun's ranks meet at the store of the attempt before, and gloo at the addresses of dead ones.
    own_store = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    torchrun = children.start("torchrun", "-m", "torch.distributed.run", *options, *script, within=own_store)
    return comeback(torchrun.lines(), faults, DDP_RANKS)


def comeback(lines: Iterator[str], faults: int, ranks: int) -> Comeback:
    """Read the restarts from the lines that a job prints."""
    raised: dict[int, float] = {}
    steps: dict[int, list[tuple[float, int, int]]] = {}
    for line in lines:
        words = line.split("] ")[-1].split()
        if words[:1] == ["raises"]:
            raised[int(words[1])] = float(words[2])
        elif words[:1] == ["steps"]:
            steps.setdefault(int(words[1]), []).append((float(words[2]), int(words[3]), int(words[4])))
        if any(run >= faults and len(each) == ranks for run, each in steps.items()):
            break
    else:
        raise click.ClickException(f"the job has ended after {len(raised)} of {faults} faults")
    whole = [run for run in sorted(steps) if len(steps[run]) == ranks]  # a run may fail before its first step, too
    trained_at = {run: max(at for at, _, _ in steps[run]) for run in whole}
    after_s = [trained_at[next(later for later in whole if later > run)] - at for run, at in sorted(raised.items())]
    second, last = steps[next(run for run in whole if run)], steps[whole[-1]]
    threads = max(step[1] for step in second), max(step[1] for step in last)
    return Comeback(after_s, threads, (max(step[2] for step in second), max(step[2] for step in last)))


@benchmark("Seconds instead of minutes: two kills.")
@click.option("--runs", default=20, show_default=True, help="Kills; in process, five times as many faults.")
def main(runs: int, quick: bool) -> Measured:
    """Measure restarts of training in process, by torchrun, and by a supervisor."""
    runs, faults = (2, 2) if quick else (runs, 5 * runs)
    with Children() as children:
        ours, torchruns = in_process(children, faults), by_torchrun(children, runs)
    with Children() as children:
        group = in_a_group(children, faults)
    with Children() as children:
        restarts = measure(children, runs)
    ours_s, torchruns_s, group_s = (spread(each.after_s) for each in (ours, torchruns, group))
    from_start = spread([restart.from_start_s for restart in restarts])
    rows = [
        ["a rank raises, in process", str(faults), ours_s.text()],
        ["a rank raises, torchrun starts all processes again", str(runs), torchruns_s.text()],
        ["a rank raises, in process, a replica group with an Agent", str(faults), group_s.text()],
        ["the same, NVIDIA's resiliency extension, as published, at least", "-", f"{sum(NVRX_S.values()):.2f}"],
        ["a rank is killed, to the quorum of all", str(runs), spread([each.whole_s for each in restarts]).text()],
        ["of that: from the start of the process", str(runs), from_start.text()],
    ]
    lines = [table(["to the first step of all, s: median (lowest to highest)", "faults", ""], rows)]
    for name, each in (("in process", ours), ("with an Agent", group)):
        lines.append(f"{name}: threads {each.threads[0]} to {each.threads[1]}, resident memory {each.growth:.3f} times")
    bars = [
        Bar("in process, median", ours_s.median, BAR_S, "s"),
        Bar("resident memory after all faults, of that after the first", ours.growth, GROWTH_BAR),
        Bar("in process with an Agent, median", group_s.median, GROUP_BAR_S, "s"),
        Bar("its resident memory", group.growth, GROWTH_BAR),
        Bar("process start to first quorum, median", from_start.median, BAR_S, "s"),
    ]
    report = {"nvrx_published": NVRX_S, "in_process": ours, "in_a_group": group, "torchrun": torchruns}
    return "\n".join(lines), bars, {**report, "restarts": restarts}


if __name__ == "__main__":
    main()
