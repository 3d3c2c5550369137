"""Whatever fails below the decorator, training ends as without faults.

Four ranks of plain DDP, and of FSDP2, over gloo or NCCL (support/failing_training.py), under one
`lighthouse-manager run` with two spares: drawn faults of all kinds, one after the other. Then, for each, faults that a
process survives: what a hundred of them leave in it. A group whose last messages gloo has not sent when it is aborted
stays until its timeout, which is why threads and descriptors are those of the median process.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click

from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import Children
from benchmarks.support.daemons import OURS, start_lighthouse
from benchmarks.support.figures import json_option, show_machine, spread, table, write_json
from examples.ports import free_port
from lighthouse_runtime.process.commands import START_MANAGER

ACTIVE, SPARES = 4, 2
SURVIVED = ("forward", "backward", "between", "loader", "while-others-wait")
FATAL = ("exit", "kill", "stop")
KINDS = ("ddp", "fsdp2")
STEPS_PER_FAULT = 5
BAR_S = 1.0
GROWTH_BAR = 1.05
LOSS_BAR = 1e-4
"""Of itself: gloo's sums do not always take the ranks in one order."""
SETTLED = 5
"""A process's first generations: what torch loads and keeps once is there after them."""


@dataclass(frozen=True, slots=True)
class Held:
    """By a process, when the first step of all ranks of a generation is done."""

    threads: int
    descriptors: int
    resident_kib: int


@dataclass(frozen=True, slots=True)
class Restart:
    """`called_s`: from the fault at that place until the function is called again in all ranks; `stepped_s`: until
    their first step is done, so with what the function does before it."""

    place: str
    called_s: float
    stepped_s: float


@dataclass(slots=True)
class Job:
    """What it printed. `losses`: of each rank at the end; `started`: its processes, spares too."""

    losses: list[float] = field(default_factory=list[float])
    started: int = 0
    restarts: list[Restart] = field(default_factory=list[Restart])
    held: dict[int, list[Held]] = field(default_factory=dict[int, list[Held]])

    @property
    def faults(self) -> int:
        return len(self.restarts)

    @property
    def lost(self) -> int:
        return sum(restart.place in FATAL for restart in self.restarts)


def train(
    children: Children,
    kind: str,
    faults: int,
    places: Sequence[str],
    *,
    steps: int,
    spares: int = SPARES,
    seed: int = 1,
    backend: str = "gloo",
) -> Job:
    """Raises ClickException if it does not end well."""
    lighthouse = start_lighthouse(children, OURS, min_replicas=1)
    folder = children.folder / f"{kind}-{faults}-{'-'.join(places)}"
    folder.mkdir()
    options = {
        "--lighthouse": lighthouse.address,
        "--replica-id": "train",
        "--bind": "127.0.0.1:0",
        "--advertise": "127.0.0.1",
        "--master-port": str(free_port()),
        "--store": "127.0.0.1:1",
        "--nproc-per-node": str(ACTIVE + spares),
        "--active-ranks": str(ACTIVE),
        "--min-active-ranks": str(ACTIVE),
        "--max-restarts": str(faults + 1),
        "--max-startup-failures": "0",
        "--restart-delay": "50ms",
        "--max-restart-delay": "50ms",
        "--log-level": "warning",
    }
    words = [word for option in options.items() for word in option]
    script = [str(folder), kind, str(steps), str(seed), str(faults), ",".join(places), backend]
    module = ("-m", "benchmarks.support.failing_training")
    supervisor = children.start(kind, "-c", START_MANAGER, "run", *words, *module, *script)
    job = follow(supervisor.lines())
    if len(job.losses) != ACTIVE:
        supervisor.fail(f"ended after {job.faults} of {faults} faults")
    supervisor.end()
    lighthouse.child.end()
    return job


def follow(lines: Iterator[str]) -> Job:
    """The lines of one rank come in their order; those of several do not."""
    job = Job()
    faults: list[tuple[int, str, float]] = []
    called: dict[int, list[float]] = {}
    stepped: dict[int, list[float]] = {}
    for line in lines:
        match line.split("] ")[-1].split():
            case ["process", _, _]:
                job.started += 1
            case ["runs", generation, at]:
                called.setdefault(int(generation), []).append(float(at))
            case ["fault", generation, place, at]:
                faults.append((int(generation), place, float(at)))
            case ["steps", generation, pid, at, *held]:
                job.held.setdefault(int(pid), []).append(Held(*map(int, held)))
                stepped.setdefault(int(generation), []).append(float(at))
            case ["ends", loss, _]:
                job.losses.append(float(loss))
            case _:
                pass
    whole = [generation for generation, ends in sorted(stepped.items()) if len(ends) == ACTIVE]
    for generation, place, struck_at in sorted(faults):
        following = next((number for number in whole if number > generation), None)
        if following is not None:
            ends = max(called[following]), max(stepped[following])
            job.restarts.append(Restart(place, *(at - struck_at for at in ends)))
    return job


@dataclass(frozen=True, slots=True)
class Growth:
    """Of each process: from the median of its first generations, once settled, to that of its last ones."""

    threads: list[float]
    descriptors: list[float]
    resident: list[float]

    @classmethod
    def of(cls, job: Job) -> "Growth":
        spans = [held[SETTLED:] for held in job.held.values() if len(held) > 2 * SETTLED]
        ends = [
            [statistics.median(getattr(each, name) for each in part) for part in (span[:SETTLED], span[-SETTLED:])]
            for name in ("threads", "descriptors", "resident_kib")
            for span in spans
        ]
        threads, descriptors, resident = (ends[at * len(spans) : (at + 1) * len(spans)] for at in range(3))
        return cls(
            [last - first for first, last in threads],
            [last - first for first, last in descriptors],
            [last / first for first, last in resident],
        )


@click.command(help=__doc__)
@click.option("--faults", default=200, show_default=True, help="Of all kinds, half below DDP and half below FSDP2.")
@click.option("--generations", default=100, show_default=True, help="Of one process, by faults that it survives.")
@click.option("--seed", default=1, show_default=True, help="What is drawn.")
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    default="gloo",
    show_default=True,
    help="nccl: all ranks on one GPU.",
)
@click.option("--quick", is_flag=True, help="A minute instead of ten: four faults, and four generations.")
@check_option
@json_option
def main(faults: int, generations: int, seed: int, backend: str, quick: bool, check: bool, path: Path | None) -> None:
    faults, generations = (4, 4) if quick else (faults, generations)
    found = show_machine()
    each = faults // len(KINDS)
    report: dict[str, dict[str, Job]] = {}
    for kind in KINDS:
        steps = STEPS_PER_FAULT * max(each, generations) + 20
        start = partial(train, kind=kind, steps=steps, seed=seed, backend=backend)
        with Children() as children:
            report[kind] = {
                "without": start(children, faults=0, places=SURVIVED, spares=0),
                "with": start(children, faults=each, places=SURVIVED + FATAL, spares=SPARES),
                "survived": start(children, faults=generations, places=SURVIVED, spares=0),
            }
    rows = [
        [place, *(_times(report[kind]["with"], place, name) for kind in KINDS for name in ("called_s", "stepped_s"))]
        for place in (*SURVIVED, *FATAL)
        if any(restart.place == place for kind in KINDS for restart in report[kind]["with"].restarts)
    ]
    heads = [f"{kind}, {what}" for kind in KINDS for what in ("called again", "first step")]
    click.echo(table(["a rank fails, s: faults, median (lowest to highest)", *heads], rows))
    click.echo()
    growths = {kind: Growth.of(report[kind]["survived"]) for kind in KINDS}
    bars: list[Bar] = []
    for kind, jobs in report.items():
        without, drawn, survived = jobs["without"], jobs["with"], jobs["survived"]
        off = max(abs(loss - without.losses[0]) for job in jobs.values() for loss in job.losses)
        called_s = [restart.called_s for restart in drawn.restarts]
        extra = drawn.started - ACTIVE - SPARES - drawn.lost
        growth = growths[kind]
        click.echo(
            f"{kind}: final loss {without.losses[0]:.9g}, off by {off:.2g} at most; {drawn.started} processes for "
            f"{ACTIVE + SPARES} ranks and {drawn.lost} lost; after {survived.faults} generations, process by process: "
            f"{growth.threads} threads and {growth.descriptors} descriptors more"
        )
        bars += [
            Bar(f"{kind}: faults that were not survived", each - drawn.faults, 0),
            Bar(f"{kind}: final loss, off by", off / abs(without.losses[0]), LOSS_BAR),
            Bar(f"{kind}: processes replaced that were not lost", extra + survived.started - ACTIVE, 0),
            Bar(f"{kind}: called again in all ranks, median of all faults", statistics.median(called_s), BAR_S, "s"),
        ]
        if growth.resident:
            bars += [
                Bar(f"{kind}: threads more, median of the processes", statistics.median(growth.threads), 0),
                Bar(f"{kind}: descriptors more, median of the processes", statistics.median(growth.descriptors), 0),
                Bar(f"{kind}: resident memory, at most", max(growth.resident), GROWTH_BAR),
            ]
    write_json(
        path, {"benchmark": "restart_faults", "backend": backend, "machine": found, "jobs": report, "growth": growths}
    )
    conclude(bars, is_checked=check)


def _times(job: Job, place: str, name: str) -> str:
    times = [getattr(restart, name) for restart in job.restarts if restart.place == place]
    return f"{len(times)}, {spread(times).text()}" if times else "0"


if __name__ == "__main__":
    main()
