"""What `lighthouse watch` knows at one moment, and how it is shown in a given width and height."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lighthouse.cli.view.layout import share
from lighthouse.cli.view.tables import greeting, job_lines, job_summary, member_lines, most_urgent, stall
from lighthouse_protocol.messages.status import JobStatus, LighthouseStatus
from lighthouse_runtime.cli.durations import format_duration
from lighthouse_runtime.cli.terminal import printable

# Of a job's block: a blank line, the three of its summary, the titles. One more names the ranks that are behind.
_JOB_LINES = 5
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


def _body(status: LighthouseStatus, width: int, height: int) -> list[Text]:
    jobs = status.jobs
    if not jobs:
        return [Text("no jobs: no replica group has joined")]
    wants = [len(job.members) for job in jobs]
    budget = height - sum(_JOB_LINES + bool(job.stall) for job in jobs)
    if budget < sum(min(want, _FEWEST_ROWS) for want in wants):
        return _cut(job_lines(jobs, width), height)
    rows = zip(jobs, share(budget, wants), strict=True)
    return [line for job, count in rows for line in _job_block(job, count, width)]


def _job_block(job: JobStatus, rows: int, width: int) -> list[Text]:
    """At most `rows` lines for members, and those of the block itself."""
    lines = [Text(""), *job_summary(job), *([stall(job)] if job.stall else [])]
    if not job.members:
        return lines
    fitting = rows if rows >= len(job.members) else rows - 1
    shown = most_urgent(job.members, fitting)
    lines += member_lines([(job.job, member) for member in shown], width)
    left = len(job.members) - len(shown)
    return [*lines, Text(f"and {left} more; `lighthouse members` lists them all", style="dim")] if left else lines


def _cut(lines: list[Text], height: int) -> list[Text]:
    if len(lines) <= height:
        return lines
    left = len(lines) - height + 1
    return [*lines[: height - 1], Text(f"and {left} lines more; `lighthouse status` shows them", style="dim")]


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
