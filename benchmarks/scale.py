"""What a thousand standing sessions cost the lighthouse: at rest, in their steps, and when one comes or thirty go.

The managers are real in all that the lighthouse sees (support/light_manager.py): a connection each, grants, beats,
recalls and revokes. They live in one process, or with --crowds in several, which share the machine's cores with the
lighthouse. With --tls all of it is done a second time, with TLS between managers and lighthouse.
"""

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import Daemon, prepare_lighthouse
from benchmarks.support.figures import json_option, show_machine, table, write_json
from benchmarks.support.scrape import is_standing
from lighthouse_protocol.limits import DEFAULT_JOB

MANY = 2000  # above it the limit of a default lighthouse is raised, and the bars are those of ten thousand
STEP_S = 0.25
DOWN_S = 1.0
DYING_SHARE = 0.03
MIN_PATIENCE_S = 60.0
SESSIONS_A_SECOND = 50  # that come at the very least
AT_REST = "at rest"
IN_STEPS = f"steps of {STEP_S:g} s"
ONE_JOINS = "one joins"
ONE_DIES = "one dies"
TLS_BAR = 1.15


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing that was done to the sessions; `told` is what the crowd says of it (session_crowd.py)."""

    name: str
    wall_s: float
    cpu_s: float
    memory_mb: float
    told: Mapping[str, Any]

    @property
    def discards(self) -> int:
        return self.told["discards"]

    @property
    def messages(self) -> int:
        """What the sessions sent besides beats."""
        return self.told["messages"]

    @property
    def beats(self) -> int:
        return self.told["beats"]

    @property
    def sent_mb(self) -> float:
        """Messages of all sessions, both ways."""
        return self.told["bytes"] / 1e6

    @property
    def quorums(self) -> list[int]:
        """Under which the sessions are at its end."""
        return self.told["quorums"]


@dataclass(frozen=True, slots=True)
class Setting:
    """`heartbeat_timeout_s`: of the lighthouse, and its lease. `crowds`: processes with managers."""

    size: int
    settle_s: float
    crowds: int = 1
    heartbeat_timeout_s: float = 5.0
    has_tls: bool = False

    @property
    def patience_s(self) -> float:
        """For all to come, or to come back."""
        return max(MIN_PATIENCE_S, self.size / SESSIONS_A_SECOND)


class Crowds:
    """The processes of managers, as one."""

    def __init__(self, children: Children, address: str, setting: Setting) -> None:
        referee, count = list[str](), setting.crowds
        if count > 1:
            path = str(children.folder / "referee")
            children.start("the referee", "-m", "benchmarks.support.referee", path).read_line()
            referee = [path]
        crowd = ["-m", "benchmarks.support.session_crowd", address, DEFAULT_JOB, str(setting.patience_s), *referee]
        self.children: list[Child] = [
            children.start(f"crowd {place}", *crowd, *([str(place), str(count)] if referee else []))
            for place in range(count)
        ]

    def ask(self, **order: Any) -> dict[str, Any]:
        """The same of all. What they tell, added up."""
        return self._ask([order] * len(self.children))

    def share(self, what: str, count: int) -> dict[str, Any]:
        """Of `count` each has its share. Those that do nothing themselves hear of it first."""
        each, more = divmod(count, len(self.children))
        return self._ask([{"what": what, "count": each + (place < more)} for place in range(len(self.children))])

    def _ask(self, orders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        began_at = time.monotonic()
        for child, order in reversed(list(zip(self.children, orders, strict=True))):
            child.send(**order)
        told = [child.answer() for child in self.children]
        counts = ("beats", "messages", "commits", "discards", "revokes", "refusals", "closings", "cpu_s", "bytes")
        return {
            **{name: sum(each[name] for each in told) for name in counts},
            **{name: max(each[name] for each in told) for name in ("longest_step_s", "longest_ack_s")},
            "told_s": max(0.0, max(each["revoked_at"] for each in told) - began_at),
            "steps_s": told[0]["steps_s"],
            "quorums": sorted({quorum_id for each in told for quorum_id in each["quorums"]}),
            "wall_s": time.monotonic() - began_at,
        }


class Arena:
    """The lighthouse, started on what was remembered, and the crowds."""

    def __init__(self, children: Children, setting: Setting) -> None:
        self.stages: list[Stage] = []
        self._setting = setting
        self._children = children
        self._settle_s = setting.settle_s
        self._lighthouse = self._prepare(0)
        self._lighthouse.serve()
        self._crowd = Crowds(children, self._lighthouse.told, setting)
        self._crowd.ask(what="pace", step_s=STEP_S)

    def _prepare(self, port: int) -> Daemon:
        size = self._setting.size
        return prepare_lighthouse(
            self._children,
            max(1, round((1 - DYING_SHARE) * size)),
            heartbeat_timeout_s=self._setting.heartbeat_timeout_s,
            port=port,
            has_tls=self._setting.has_tls,
            options=["--max-members", str(2 * size)] if size > MANY else [],
        )

    def add(self, name: str, count: int) -> None:
        self._measure(name, "add", count=count)

    def die(self, name: str, count: int) -> None:
        self._measure(name, "die", count=count)

    def watch(self, name: str, step_s: float, seconds: float) -> None:
        """Nothing happens but steps of `step_s`."""
        self._crowd.ask(what="pace", step_s=step_s)
        time.sleep(self._settle_s)
        self._crowd.ask(what="report")
        began_at, cpu_s = time.monotonic(), self._lighthouse.child.cpu_s()
        time.sleep(seconds)
        self._note(name, time.monotonic() - began_at, cpu_s, self._crowd.ask(what="report"))

    def restart(self) -> None:
        """SIGKILL, and a new one DOWN_S later, until its quorum stands again."""
        old = self._lighthouse
        self._lighthouse = self._prepare(old.port)
        cpu_s, began_at = self._lighthouse.child.cpu_s(), time.monotonic()
        old.child.end()
        time.sleep(DOWN_S)
        self._lighthouse.serve()
        self._wait_standing()
        wall_s = time.monotonic() - began_at
        time.sleep(self._settle_s)
        self._note(
            f"the lighthouse is killed, another serves {DOWN_S:g} s later",
            wall_s,
            cpu_s,
            self._crowd.ask(what="report"),
        )

    def settle(self) -> None:
        time.sleep(self._settle_s + random.uniform(0, STEP_S))  # what comes next comes at any moment of a step
        self._crowd.ask(what="report")

    def _measure(self, name: str, what: str, *, count: int) -> None:
        cpu_s = self._lighthouse.child.cpu_s()
        told = self._crowd.share(what, count)
        self._note(name, told["wall_s"], cpu_s, told)

    def _note(self, name: str, wall_s: float, cpu_before_s: float, told: Mapping[str, Any]) -> None:
        child = self._lighthouse.child
        stage = Stage(name, wall_s, child.cpu_s() - cpu_before_s, child.memory_mb(), told)
        self.stages.append(stage)
        click.echo(f"{name}: {wall_s:.2f} s, {stage.cpu_s:.2f} s of CPU, {stage.memory_mb:.0f} MB", err=True)

    def _wait_standing(self) -> None:
        ends_at = time.monotonic() + self._setting.patience_s
        while not is_standing(self._lighthouse):
            if time.monotonic() > ends_at:
                self._lighthouse.child.fail(f"is not back within {self._setting.patience_s:g} s")
            time.sleep(0.1)


def run(setting: Setting, joins: int, seconds: float) -> list[Stage]:
    size = setting.size
    with Children() as children:
        arena = Arena(children, setting)
        arena.add(f"{size} come, the first quorum", size)
        arena.watch(AT_REST, math.inf, seconds)
        arena.watch(IN_STEPS, STEP_S, seconds / 2)
        for number in range(joins):
            arena.add(f"{ONE_JOINS}, {number + 1}", 1)
            arena.settle()
        arena.die(ONE_DIES, 1)
        arena.settle()
        many = max(1, round(DYING_SHARE * size))
        arena.die(f"{many} die at once", many)
        arena.settle()
        arena.restart()
        return arena.stages


def render(stages: Sequence[Stage]) -> str:
    counts = ["MB both ways", "beats", "other messages", "discards", "longest step s", "all told s", "quorum"]
    header = ["stage", "wall s", "CPU s", "cores", "memory MB", "load CPU s", *counts]
    first = max(stages[0].quorums)
    return table(header, [_cells(stage, first) for stage in stages])


def _cells(stage: Stage, first_quorum_id: int) -> list[str]:
    times = [f"{stage.wall_s:.2f}", f"{stage.cpu_s:.2f}", f"{stage.cpu_s / stage.wall_s:.2f}"]
    load = [
        f"{stage.memory_mb:.0f}",
        f"{stage.told['cpu_s']:.2f}",
        f"{stage.sent_mb:.1f}",
        str(stage.beats),
        str(stage.messages),
        str(stage.discards),
    ]
    quorums = " ".join(f"+{quorum_id - first_quorum_id}" for quorum_id in stage.quorums)
    told = f"{stage.told['told_s']:.2f}" if stage.told["told_s"] else "-"
    return [stage.name, *times, *load, f"{stage.told['longest_step_s']:.2f}", told, quorums]


def bars(stages: Sequence[Stage], size: int) -> list[Bar]:
    by_name = {stage.name: stage for stage in stages}
    at_rest, in_steps, one_dies = (by_name[name] for name in (AT_REST, IN_STEPS, ONE_DIES))
    joins = [stage for stage in stages if stage.name.startswith(ONE_JOINS)]
    many_die, restart = stages[-2:]
    cores = at_rest.cpu_s / at_rest.wall_s
    if size > MANY:
        costs = [
            Bar(stages[0].name, stages[0].wall_s, 30, "s"),
            Bar(f"{AT_REST}, cores", cores, 0.6),
            Bar("memory, at most", max(stage.memory_mb for stage in stages), 1024, "MB"),
            Bar(f"{ONE_DIES}, all are told", one_dies.told["told_s"] or math.inf, 1.5, "s"),
            Bar(f"{restart.name}, its quorum stands", restart.wall_s, DOWN_S + 15, "s"),
        ]
    else:
        wall_s, sent_mb = [stage.wall_s for stage in joins], [stage.sent_mb for stage in joins]
        costs = [
            Bar(f"{AT_REST}, cores", cores, 0.06),
            Bar(f"{AT_REST}, memory", at_rest.memory_mb, 150, "MB"),
            Bar(f"{ONE_JOINS}, CPU, median of {len(joins)}", statistics.median(s.cpu_s for s in joins), 0.15, "s"),
            Bar(f"{ONE_JOINS}, wall, median of {len(joins)}", statistics.median(wall_s), 2, "s"),
            Bar(f"{ONE_JOINS}, messages, median of {len(joins)}", statistics.median(sent_mb), 6, "MB"),
        ]
    return [
        *costs,
        Bar(f"{IN_STEPS}, messages besides beats", in_steps.messages, 0),
        Bar(f"{ONE_JOINS}, discarded steps", sum(stage.discards for stage in joins), 0),
        Bar(f"{many_die.name}, new quorums", many_die.quorums[-1] - one_dies.quorums[-1], 1),
        Bar("the lighthouse restarts, new quorums", int(restart.quorums != many_die.quorums), 0),
        Bar("the lighthouse restarts, discarded steps", restart.discards, 0),
    ]


def tls_text(plain: Sequence[Stage], by_tls: Sequence[Stage]) -> str:
    """What each stage cost the lighthouse with TLS, of what it cost without."""
    rows = [
        [
            without.name,
            f"{with_tls.cpu_s / without.cpu_s:.2f}",
            f"{with_tls.memory_mb / without.memory_mb:.2f}",
        ]
        for without, with_tls in zip(plain, by_tls, strict=True)
    ]
    return table(["with TLS, of those without", "CPU", "memory"], rows)


def tls_bars(plain: Sequence[Stage], by_tls: Sequence[Stage]) -> list[Bar]:
    """A step is as long, and nothing is lost. What the lighthouse pays is shown, without a bar."""
    took = [next(stage for stage in stages if stage.name == IN_STEPS).told["steps_s"] for stages in (plain, by_tls)]
    without, with_tls = (statistics.median(steps) for steps in took)
    joins = [stage for stage in by_tls if stage.name.startswith(ONE_JOINS)]
    before, after = by_tls[-2:]
    return [
        Bar(f"TLS: {IN_STEPS}, median, of that without", with_tls / without, TLS_BAR),
        Bar(f"TLS: {ONE_JOINS}, discarded steps", sum(stage.discards for stage in joins), 0),
        Bar("TLS: the lighthouse restarts, new quorums", int(after.quorums != before.quorums), 0),
        Bar("TLS: the lighthouse restarts, discarded steps", after.discards, 0),
    ]


@click.command()
@click.option("--size", type=click.IntRange(10), default=1000, show_default=True, help="Sessions.")
@click.option("--joins", type=click.IntRange(1), default=5, show_default=True, help="How often one joins.")
@click.option("--seconds", type=click.FloatRange(1), default=20.0, show_default=True, help="To watch them at rest.")
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: 30 sessions.")
@click.option("--crowds", type=click.IntRange(1), default=1, show_default=True, help="Processes with managers.")
@click.option(
    "--heartbeat-timeout",
    "heartbeat_timeout_s",
    type=click.FloatRange(1),
    default=5.0,
    show_default=True,
    help="Of the lighthouse, in seconds.",
)
@click.option("--tls", "with_tls", is_flag=True, help="All of it again with TLS, and the ratios.")
@check_option
@json_option
def main(
    size: int,
    joins: int,
    seconds: float,
    quick: bool,
    crowds: int,
    heartbeat_timeout_s: float,
    with_tls: bool,
    check: bool,
    path: Path | None,
) -> None:
    """What a thousand standing sessions cost the lighthouse."""
    settle_s = 3.0
    if quick:
        size, joins, seconds, settle_s = 30, 2, 2.0, 0.5
    setting = Setting(size, settle_s, crowds, heartbeat_timeout_s)
    found = show_machine()
    stages = run(setting, joins, seconds)
    click.echo(render(stages))
    asked, by_tls = bars(stages, size), list[Stage]()
    if with_tls:
        by_tls = run(replace(setting, has_tls=True), joins, seconds)
        click.echo(f"\nWith TLS:\n{render(by_tls)}\n\n{tls_text(stages, by_tls)}")
        asked += tls_bars(stages, by_tls)
    report = {"benchmark": "scale", "machine": found, "setting": setting, "sessions": size, "stages": stages}
    write_json(path, report | ({"stages_with_tls": by_tls} if with_tls else {}))
    conclude(asked, is_checked=check)


if __name__ == "__main__":
    main()
