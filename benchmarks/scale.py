"""Measure the lighthouse's cost of a thousand standing sessions: at rest, in steps, and when one joins or thirty die.

To the lighthouse, the managers look real (support/session_crowd.py): each has a connection and handles grants,
heartbeats, recalls and revokes. They share one process, and its cores with the lighthouse. With --tls, everything runs
a second time with TLS between managers and lighthouse.
"""

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from benchmarks.support.children import Children
from benchmarks.support.daemons import Daemon, is_standing, prepare_lighthouse, replace_lighthouse
from benchmarks.support.figures import Bar, Measured, benchmark, table
from lighthouse_protocol.limits import DEFAULT_JOB

MANY = 2000  # above this size, raise the lighthouse's limit and use the bars for ten thousand
STEP_S = 0.25
DOWN_S = 1.0
DYING_SHARE = 0.03
MIN_PATIENCE_S = 60.0
SESSIONS_A_SECOND = 50  # minimum rate of joins
AT_REST = "at rest"
IN_STEPS = f"steps of {STEP_S:g} s"
ONE_JOINS = "one joins"
ONE_DIES = "one dies"
TLS_BAR = 1.15


@dataclass(frozen=True, slots=True)
class Stage:
    """Measurements of one stage. `told` is the report of the crowd (session_crowd.py)."""

    name: str
    wall_s: float
    cpu_s: float
    memory_mb: float
    told: Mapping[str, Any]

    @property
    def sent_mb(self) -> float:
        """Size of all sessions' messages in both directions, in 10^6 bytes."""
        return self.told["bytes"] / 1e6

    @property
    def quorums(self) -> list[int]:
        """Ids of the quorums of the sessions at the end of the stage."""
        return self.told["quorums"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Size and options of a run. `heartbeat_timeout_s` is also the lighthouse's lease."""

    size: int
    settle_s: float
    heartbeat_timeout_s: float = 5.0
    has_tls: bool = False

    @property
    def patience_s(self) -> float:
        """Maximum seconds until all sessions have joined, or reconnected."""
        return max(MIN_PATIENCE_S, self.size / SESSIONS_A_SECOND)


class Arena:
    """The lighthouse and the crowd."""

    def __init__(self, children: Children, setting: Setting) -> None:
        self.stages: list[Stage] = []
        self._setting = setting
        self._children = children
        self._lighthouse = self._prepare(0)
        self._lighthouse.serve()
        crowd = [self._lighthouse.told, DEFAULT_JOB, str(setting.patience_s)]
        self._crowd = children.start("the crowd", "-m", "benchmarks.support.session_crowd", *crowd)
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

    def change(self, name: str, what: str, count: int) -> None:
        """Add or kill `count` sessions, and wait until the rest train."""
        began_at, cpu_s = time.monotonic(), self._lighthouse.child.cpu_s()
        told = self._crowd.ask(what=what, count=count)
        told["told_s"] = max(0.0, told["revoked_at"] - began_at)
        self._note(name, time.monotonic() - began_at, cpu_s, told)

    def watch(self, name: str, step_s: float, seconds: float) -> None:
        """Measure a period with steps of `step_s` and no other events."""
        self._crowd.ask(what="pace", step_s=step_s)
        time.sleep(self._setting.settle_s)
        self._crowd.ask(what="report")
        began_at, cpu_s = time.monotonic(), self._lighthouse.child.cpu_s()
        time.sleep(seconds)
        self._note(name, time.monotonic() - began_at, cpu_s, self._crowd.ask(what="report"))

    def restart(self) -> None:
        """Kill the lighthouse, start another after DOWN_S, and wait until the quorum stands again."""
        old = self._lighthouse
        self._lighthouse = self._prepare(old.port)
        cpu_s = self._lighthouse.child.cpu_s()
        began_at = replace_lighthouse(old, self._lighthouse, DOWN_S)
        while not is_standing(self._lighthouse):
            if time.monotonic() > began_at + DOWN_S + self._setting.patience_s:
                self._lighthouse.child.fail(f"is not back within {self._setting.patience_s:g} s")
            time.sleep(0.1)
        wall_s = time.monotonic() - began_at
        time.sleep(self._setting.settle_s)
        name = f"the lighthouse is killed, another serves {DOWN_S:g} s later"
        self._note(name, wall_s, cpu_s, self._crowd.ask(what="report"))

    def settle(self) -> None:
        time.sleep(self._setting.settle_s + random.uniform(0, STEP_S))  # the next thing comes at any moment of a step
        self._crowd.ask(what="report")

    def _note(self, name: str, wall_s: float, cpu_before_s: float, told: Mapping[str, Any]) -> None:
        child = self._lighthouse.child
        stage = Stage(name, wall_s, child.cpu_s() - cpu_before_s, child.memory_mb(), told)
        self.stages.append(stage)
        click.echo(f"{name}: {wall_s:.2f} s, {stage.cpu_s:.2f} s of CPU, {stage.memory_mb:.0f} MB", err=True)


def run(setting: Setting, joins: int, seconds: float) -> list[Stage]:
    size = setting.size
    with Children() as children:
        arena = Arena(children, setting)
        arena.change(f"{size} come, the first quorum", "add", size)
        arena.watch(AT_REST, math.inf, seconds)
        arena.watch(IN_STEPS, STEP_S, seconds / 2)
        for number in range(joins):
            arena.change(f"{ONE_JOINS}, {number + 1}", "add", 1)
            arena.settle()
        many = max(1, round(DYING_SHARE * size))
        for name, count in ((ONE_DIES, 1), (f"{many} die at once", many)):
            arena.change(name, "die", count)
            arena.settle()
        arena.restart()
        return arena.stages


def render(stages: Sequence[Stage]) -> str:
    header = ["stage", "wall s", "CPU s", "cores", "memory MB", "load CPU s", "MB both ways", "beats"]
    header += ["other messages", "discards", "longest step s", "all told s", "quorum"]
    first = max(stages[0].quorums)
    return table(header, [_cells(stage, first) for stage in stages])


def _cells(stage: Stage, first_quorum_id: int) -> list[str]:
    told = stage.told
    return [
        stage.name,
        *(f"{value:.2f}" for value in (stage.wall_s, stage.cpu_s, stage.cpu_s / stage.wall_s)),
        f"{stage.memory_mb:.0f}",
        f"{told['cpu_s']:.2f}",
        f"{stage.sent_mb:.1f}",
        *(str(told[name]) for name in ("beats", "messages", "discards")),
        f"{told['longest_step_s']:.2f}",
        f"{told['told_s']:.2f}" if told.get("told_s") else "-",
        " ".join(f"+{quorum_id - first_quorum_id}" for quorum_id in stage.quorums),
    ]


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
        of = f"median of {len(joins)}"
        costs = [
            Bar(f"{AT_REST}, cores", cores, 0.06),
            Bar(f"{AT_REST}, memory", at_rest.memory_mb, 150, "MB"),
            Bar(f"{ONE_JOINS}, CPU, {of}", statistics.median(stage.cpu_s for stage in joins), 0.15, "s"),
            Bar(f"{ONE_JOINS}, wall, {of}", statistics.median(stage.wall_s for stage in joins), 2, "s"),
            Bar(f"{ONE_JOINS}, messages, {of}", statistics.median(stage.sent_mb for stage in joins), 6, "MB"),
        ]
    return [
        *costs,
        Bar(f"{IN_STEPS}, messages besides beats", in_steps.told["messages"], 0),
        Bar(f"{many_die.name}, new quorums", many_die.quorums[-1] - one_dies.quorums[-1], 1),
        *_unharmed(stages),
    ]


def _unharmed(stages: Sequence[Stage], name: str = "") -> list[Bar]:
    """Return the bars on steps lost to a join or a restart of the lighthouse. Their limit is 0."""
    joins = [stage for stage in stages if stage.name.startswith(ONE_JOINS)]
    before, after = stages[-2:]
    return [
        Bar(f"{name}{ONE_JOINS}, discarded steps", sum(stage.told["discards"] for stage in joins), 0),
        Bar(f"{name}the lighthouse restarts, new quorums", int(after.quorums != before.quorums), 0),
        Bar(f"{name}the lighthouse restarts, discarded steps", after.told["discards"], 0),
    ]


def tls_text(plain: Sequence[Stage], by_tls: Sequence[Stage]) -> str:
    """Return a table of the lighthouse's cost with TLS relative to the cost without."""
    rows = [
        [without.name, f"{with_tls.cpu_s / without.cpu_s:.2f}", f"{with_tls.memory_mb / without.memory_mb:.2f}"]
        for without, with_tls in zip(plain, by_tls, strict=True)
    ]
    return table(["with TLS, of those without", "CPU", "memory"], rows)


def tls_bars(plain: Sequence[Stage], by_tls: Sequence[Stage]) -> list[Bar]:
    """Return the bars with TLS: steps take equally long and none is lost. The lighthouse's cost has no bar."""
    took = [next(stage for stage in stages if stage.name == IN_STEPS).told["steps_s"] for stages in (plain, by_tls)]
    without, with_tls = (statistics.median(steps) for steps in took)
    return [Bar(f"TLS: {IN_STEPS}, median, of that without", with_tls / without, TLS_BAR), *_unharmed(by_tls, "TLS: ")]


@benchmark("Seconds instead of minutes: 30 sessions.")
@click.option("--size", type=click.IntRange(10), default=1000, show_default=True, help="Number of sessions.")
@click.option("--joins", type=click.IntRange(1), default=5, show_default=True, help="Times that a group joins.")
@click.option("--seconds", type=click.FloatRange(1), default=20.0, show_default=True, help="Seconds at rest.")
@click.option("--heartbeat-timeout", type=click.FloatRange(1), default=5.0, show_default=True, help="Timeout in s.")
@click.option("--tls", "with_tls", is_flag=True, help="Also measure with TLS, and print the ratios.")
def main(size: int, joins: int, seconds: float, heartbeat_timeout: float, with_tls: bool, quick: bool) -> Measured:
    """Measure the lighthouse's cost of a thousand standing sessions."""
    settle_s = 3.0
    if quick:
        size, joins, seconds, settle_s = 30, 2, 2.0, 0.5
    setting = Setting(size, settle_s, heartbeat_timeout)
    stages = run(setting, joins, seconds)
    text, asked = render(stages), bars(stages, size)
    report = {"setting": setting, "stages": stages}
    if with_tls:
        by_tls = run(replace(setting, has_tls=True), joins, seconds)
        text += f"\n\nWith TLS:\n{render(by_tls)}\n\n{tls_text(stages, by_tls)}"
        asked += tls_bars(stages, by_tls)
        report["stages_with_tls"] = by_tls
    return text, asked, report


if __name__ == "__main__":
    main()
