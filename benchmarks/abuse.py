"""What one client without a credential can do to others: honest groups step beside one attack at full speed.

Every attack (support/attacker.py) gets a lighthouse of its own, with a job of honest managers (light_manager.py there)
that step in lockstep. After a while of the attack one more group joins that job, a first group joins a new job, and a
browser asks for /livez and for the events of the page. All share this machine; the attacker's process yields to others.
"""

import math
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.support.attacker import ATTACKS
from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import HERE, Daemon, prepare_lighthouse
from benchmarks.support.figures import json_option, percentile, show_machine, table, write_json
from lighthouse_protocol.limits import DEFAULT_JOB

GROUPS = 8
STEP_S = 0.05
SETTLE_S = 1.0
JOINED_WITHIN_S = 30.0
WAITED_FOR_S = 150.0
"""For one that joins later: the bar is not met, and the table says when it came."""
ANSWERED_WITHIN_S = 30.0
TAIL = 0.99
MAX_MEMORY_MIB = 512.0
MAX_RATIO = 2.0
MIB_PER_MB = 1e6 / 2**20


@dataclass(frozen=True, slots=True)
class Result:
    """In seconds, infinite: it never came; memory is the lighthouse's peak. `told` is what the attacker tells."""

    attack: str
    step_before_s: float
    step_during_s: float
    longest_ack_s: float
    discards: int
    memory_mib: float
    join_s: float
    new_job_s: float
    livez_s: float
    events_s: float
    cores: float
    told: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        return self.step_during_s / self.step_before_s


class Arena:
    """A lighthouse and the honest job."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self.lighthouse: Daemon = prepare_lighthouse(children, 1)
        self.lighthouse.serve()
        self._honest = self._crowd(DEFAULT_JOB)
        self._honest.ask(what="pace", step_s=STEP_S)
        self._honest.ask(what="add", count=GROUPS)
        self._fresh = self._crowd("fresh")  # is ready to come

    def measure(self, attack: str, seconds: float) -> Result:
        before = self._watch(seconds)
        host = ["-m", "benchmarks.support.attacker", attack, self.lighthouse.address, str(self.lighthouse.http_port)]
        attacker = self._children.start(f"the attacker ({attack})", *host)
        attacker.read_line()
        cpu_s, began_at = self.lighthouse.child.cpu_s(), time.monotonic()
        during = self._watch(seconds)
        cores = (self.lighthouse.child.cpu_s() - cpu_s) / (time.monotonic() - began_at)
        join_s, new_job_s = self._join(self._honest), self._join(self._fresh)
        livez_s, events_s = self._took(self._get("/livez")), self._took(self._get("/events"))
        told = attacker.ask()
        memory_mib = self.lighthouse.child.memory_mb("VmHWM") * MIB_PER_MB
        return Result(
            attack,
            _tail(before),
            _tail(during),
            during["longest_ack_s"],
            during["discards"],
            memory_mib,
            join_s,
            new_job_s,
            livez_s,
            events_s,
            cores,
            told,
        )

    def _crowd(self, job: str) -> Child:
        crowd = ["-m", "benchmarks.support.session_crowd", self.lighthouse.address, job, str(WAITED_FOR_S)]
        return self._children.start(f"the managers of {job}", *crowd)

    def _watch(self, seconds: float) -> Mapping[str, Any]:
        time.sleep(SETTLE_S)
        self._honest.ask(what="report")
        time.sleep(seconds)
        return self._honest.ask(what="report")

    def _join(self, crowd: Child) -> float:
        try:
            return crowd.ask(what="add", count=1)["wall_s"]
        except RuntimeError:  # it ended: no quorum within its time
            return math.inf

    def _took(self, work: Callable[[], None]) -> float:
        began_at = time.monotonic()
        try:
            work()
        except OSError:
            return math.inf
        return time.monotonic() - began_at

    def _get(self, path: str) -> Callable[[], None]:
        """The first lines of what is there; of one that is full, the next try."""

        def work() -> None:
            ends_at = time.monotonic() + ANSWERED_WITHIN_S
            while True:
                try:
                    url = f"http://{HERE}:{self.lighthouse.http_port}{path}"
                    with urllib.request.urlopen(url, timeout=ANSWERED_WITHIN_S) as answer:
                        answer.readline()
                    return
                except OSError:
                    if time.monotonic() > ends_at:
                        raise
                    time.sleep(0.2)

        return work


def _tail(told: Mapping[str, Any]) -> float:
    return percentile(told["steps_s"], TAIL) if told["steps_s"] else math.inf


def run(attacks: Sequence[str], seconds: float) -> list[Result]:
    results: list[Result] = []
    for attack in attacks:
        with Children() as children:
            results.append(Arena(children).measure(attack, seconds))
        click.echo(" | ".join(_cells(results[-1])), err=True)
    return results


def render(results: Sequence[Result]) -> str:
    header = ["attack", "p99 step ms before", "during", "ratio", "longest ack ms", "discards", "peak MiB", "cores"]
    header += ["joins, s", "new job, s", "/livez, s", "/events, s", "let do", "refused"]
    return table(header, [_cells(result) for result in results])


def _cells(result: Result) -> list[str]:
    times = [f"{1000 * each:.0f}" for each in (result.step_before_s, result.step_during_s)]
    rest = [f"{1000 * result.longest_ack_s:.0f}", str(result.discards), f"{result.memory_mib:.0f}"]
    waits = [_seconds(each) for each in (result.join_s, result.new_job_s, result.livez_s, result.events_s)]
    refused = sum(result.told["refused"].values())
    done = str(result.told["done"])
    return [
        result.attack,
        *times,
        f"{result.ratio:.2f}",
        *rest,
        f"{result.cores:.2f}",
        *waits,
        done,
        str(refused),
    ]


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f}"


def bars(results: Sequence[Result]) -> list[Bar]:
    found: list[Bar] = []
    for result in results:
        found += [
            Bar(f"{result.attack}: p99 step, of that before", result.ratio, MAX_RATIO),
            Bar(f"{result.attack}: peak memory", result.memory_mib, MAX_MEMORY_MIB, "MiB"),
            Bar(f"{result.attack}: a group joins", result.join_s, JOINED_WITHIN_S, "s"),
            Bar(f"{result.attack}: a new job's first group joins", result.new_job_s, JOINED_WITHIN_S, "s"),
        ]
    return found


@click.command()
@click.option("--seconds", type=click.FloatRange(1), default=10.0, show_default=True, help="To watch each attack.")
@click.option("--attack", "attacks", multiple=True, type=click.Choice(list(ATTACKS)), help="Only these.")
@click.option("--quick", is_flag=True, help="2 seconds each, of three attacks.")
@check_option
@json_option
def main(seconds: float, attacks: tuple[str, ...], quick: bool, check: bool, path: Path | None) -> None:
    """What one client without a credential can do to honest groups."""
    if quick:
        seconds, attacks = 2.0, attacks or ("bitmaps", "replica-ids", "slots")
    found = show_machine()
    results = run(attacks or tuple(ATTACKS), seconds)
    click.echo(render(results))
    for result in results:
        click.echo(f"{result.attack}: {result.told['refused'] or 'nothing was refused'} {result.told['last_refusal']}")
    write_json(path, {"benchmark": "abuse", "machine": found, "results": results})
    conclude(bars(results), is_checked=check)


if __name__ == "__main__":
    main()
