"""What `lighthouse watch` knows at one moment, and how it is shown in a given width and height."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lighthouse.cli.view.layout import share
from lighthouse.cli.view.tables import (
    greeting,
    has_quorum,
    job_summary,
    member_lines,
    most_urgent,
    most_urgent_ranks,
    run_rank_lines,
    run_summary,
    stall,
    status_lines,
)
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_protocol.messages.status import JobStatus, LighthouseStatus
from lighthouse_runtime.cli.durations import format_duration
from lighthouse_runtime.cli.terminal import printable

_FEWEST_ROWS = 2
SILENCE_SHOWN_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class View:
    """`asked_at`, `answered_at` and `failing_since` are wall-clock seconds; `error` is empty while all is well."""

    address: str
    asked_at: float
    status: LighthouseStatus | None = None
    answered_at: float = 0.0
    failing_since: float | None = None
    error: str = ""
    is_unreachable: bool = True

    def lines(self, width: int, height: int, now: float) -> list[Text]:
        head = [self._headline(now)]
        if self.error:
            head.append(Text(f"  {printable(self.error)}", style="red"))
        body = _body(self.status, width, height - len(head)) if self.status else []
        if self.failing_since is not None:
            for line in body:
                line.stylize("dim")
        lines = (head + body)[:height]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines

    def _headline(self, now: float) -> Text:
        if self.failing_since is not None:
            since = f"{_clock(self.failing_since)} ({format_duration(now - self.failing_since)})"
            seen = f"; this is of {_clock(self.answered_at)}" if self.status else ""
            trouble = "unreachable" if self.is_unreachable else "refuses"
            return Text(f"lighthouse {trouble} since {since}{seen}", style="bold red")
        silence_s = now - self.asked_at
        if self.asked_at > self.answered_at and silence_s > SILENCE_SHOWN_AFTER_S:
            return Text(f"waiting for {self.address} to answer, {format_duration(silence_s)}", style="bold yellow")
        return Text(greeting(self.status, self.address) if self.status else f"asking {self.address}", style="bold")


@dataclass(frozen=True, slots=True)
class Screen:
    """A rich renderable: the newest view, at whatever size the terminal has now."""

    newest: Callable[[], View]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or options.max_height
        yield Text("\n", no_wrap=True).join(self.newest().lines(options.max_width, height, time.time()))


@dataclass(frozen=True, slots=True)
class _Block:
    """Of a job or a run. `rows`: how many it could have below `head`; `table` makes a table of so many of them."""

    head: list[Text]
    rows: int
    table: Callable[[int], list[Text]]
    more: str

    def lines(self, rows: int) -> list[Text]:
        if not self.rows:
            return self.head
        shown = rows if rows >= self.rows else rows - 1
        left = self.rows - shown
        note = [Text(f"and {left} more; `{self.more}` lists them all", style="dim")] if left else []
        return [*self.head, *self.table(shown), *note]


def _body(status: LighthouseStatus, width: int, height: int) -> list[Text]:
    blocks = list(_blocks(status, width))
    wants = [block.rows for block in blocks]
    budget = height - sum(len(block.head) + 1 for block in blocks)
    if not blocks or budget < sum(min(want, _FEWEST_ROWS) for want in wants):
        return _cut(status_lines(status, width), height)
    shares = zip(blocks, share(budget, wants), strict=True)
    return [line for block, rows in shares for line in block.lines(rows)]


def _blocks(status: LighthouseStatus, width: int) -> Iterator[_Block]:
    runs = [run for run in status.runs if run.ranks]
    for job in status.jobs:
        stalls = [stall(job)] if job.stall else []
        if has_quorum(job, runs):
            head, stalls = [Text(""), *job_summary(job)], []
            yield _Block(head, len(job.members), functools.partial(_members, job, width), "lighthouse members")
        for run in (run for run in runs if run.job == job.job):
            head, stalls = [Text(""), *run_summary(run), *stalls], []
            yield _Block(head, len(run.ranks), functools.partial(_ranks, run, width), "lighthouse ranks")


def _members(job: JobStatus, width: int, count: int) -> list[Text]:
    return member_lines([(job.job, member) for member in most_urgent(job.members, count)], width)


def _ranks(run: RunStatus, width: int, count: int) -> list[Text]:
    return run_rank_lines(most_urgent_ranks(run.ranks, count), width)


def _cut(lines: list[Text], height: int) -> list[Text]:
    if len(lines) <= height:
        return lines
    left = len(lines) - height + 1
    return [*lines[: height - 1], Text(f"and {left} lines more; `lighthouse status` shows them", style="dim")]


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
