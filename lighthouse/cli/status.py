"""Verbs `status` and `watch`, which show whether jobs make progress, and if not, why.

`watch` polls the status. On a terminal, it redraws the full screen, which `View` lays out for the terminal's size.
Otherwise, it prints one block of text or one JSON line per answer.
"""

import dataclasses
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from lighthouse.cli.layout import is_terminal, make_console, print_lines, share
from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options
from lighthouse.cli.tables import (
    greeting,
    has_quorum,
    job_summary,
    member_lines,
    most_urgent,
    run_rank_lines,
    run_summary,
    stall,
    status_lines,
    wrapped,
)
from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_protocol.messages.run import RunStatus
from lighthouse_protocol.messages.status import JobStatus, LighthouseStatus
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, UnknownName, Unreachable
from lighthouse_runtime.cli import Duration, format_duration, printable


@click.command()
@client_options(job_help=EVERY_JOB)
def status(given: ClientOptions) -> None:
    """Show whether each job is making progress, and if not, why."""
    try:
        answer = given.status(ranks=given.output == "json")  # a program gets the same document as from /status
    except UnknownName as e:  # a stopped run has no processes left, so its job is unknown
        stopped = _stopped(given, given.job) if given.job else []
        raise UnknownName("; ".join((str(e), *(line.plain for line in stopped)))) from None

    def lines(width: int) -> list[Text]:
        stopped = [
            text for job in sorted({given.job_name, *(j.job for j in answer.jobs)}) for text in _stopped(given, job)
        ]
        last = [*stopped, Text(greeting(answer, given.address), style="dim")]
        return [*status_lines(answer, width), *(line for text in last for line in wrapped(text, width))]

    given.show(answer, lines)


def _stopped(given: ClientOptions, job: str) -> list[Text]:
    """Return a line per stopped run of a job, because the status does not show why its ranks are missing."""
    with given.connect(job) as client:
        runs = client.runs(timeout_s=given.timeout)
    of_job = "" if job == DEFAULT_JOB else f" --job {job}"
    lines = (
        f"run {run.run} of job {job} is stopped: {run.stop.text}; "
        f"undo it with `lighthouse resume --run {run.run}{of_job}`"
        for run in runs
        if run.stop is not None
    )
    return [Text(printable(line), style="red") for line in lines]


_FEWEST_ROWS = 2
SILENCE_SHOWN_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class View:
    """Content of the screen of `watch`: the most recent status and the state of the connection."""

    address: str
    asked_at: float  # Unix time of the newest request
    status: LighthouseStatus | None = None
    answered_at: float = 0.0  # Unix time of the newest answer
    failing_since: float | None = None  # Unix time of the first failed request since the newest answer
    error: str = ""  # empty while the lighthouse answers
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
    """Rich renderable that shows the newest View at the terminal's current size."""

    newest: Callable[[], View]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or options.max_height
        yield Text("\n", no_wrap=True).join(self.newest().lines(options.max_width, height, time.time()))


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines about a job or a run, followed by a table that can be limited to the rows that fit on the screen."""

    head: list[Text]
    rows: int  # rows that the table could have below `head`
    table: Callable[[int], list[Text]]  # makes a table of that number of rows
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

            def members(count: int, job: JobStatus = job) -> list[Text]:
                return member_lines([(job.job, member) for member in most_urgent(job.members, count)], width)

            head, stalls = [Text(""), *job_summary(job)], []
            yield _Block(head, len(job.members), members, "lighthouse members")
        for run in (run for run in runs if run.job == job.job):

            def ranks(count: int, run: RunStatus = run) -> list[Text]:
                return run_rank_lines(run.ranks, count, width)

            head, stalls = [Text(""), *run_summary(run), *stalls], []
            yield _Block(head, len(run.ranks), ranks, "lighthouse ranks")


def _cut(lines: list[Text], height: int) -> list[Text]:
    if len(lines) <= height:
        return lines
    left = len(lines) - height + 1
    return [*lines[: height - 1], Text(f"and {left} lines more; `lighthouse status` shows them", style="dim")]


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


PLAIN_LINES = 100
FRAMES_PER_S = 4


@click.command()
@click.option("--interval", type=Duration(), default="1s", show_default=True, help="Time between requests.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N requests.  [default: never]")
@client_options(job_help=EVERY_JOB)
def watch(given: ClientOptions, interval: float, count: int | None) -> None:
    """Show the status and refresh it until Ctrl-C.

    Reconnects if the lighthouse restarts. With --format json, prints one document per line.
    """
    poll = Poll(given)
    try:
        with _restoring_terminal() as check:
            _show(poll, given.output, _ticks(interval, count, check))
    except KeyboardInterrupt:
        return
    if poll.view.error:
        sys.exit(1)


class Poll:
    """Polls the status and keeps the most recent answer, or error, in `view`."""

    def __init__(self, given: ClientOptions) -> None:
        self._given = given
        self.view: View = View(given.address, asked_at=time.time())

    def ask(self) -> View:
        self.view = view = dataclasses.replace(self.view, asked_at=time.time())
        try:
            status = self._given.status()
            self.view = View(view.address, view.asked_at, status, answered_at=time.time())
        except LighthouseError as e:
            since = view.asked_at if view.failing_since is None else view.failing_since
            self.view = dataclasses.replace(
                view,
                error=str(e) or type(e).__name__,
                failing_since=since,
                is_unreachable=isinstance(e, Unreachable | DeadlinePassed),
            )
        return self.view


def _ticks(interval_s: float, count: int | None, check: Callable[[], None]) -> Iterator[None]:
    """Yield whenever the status should be polled: every `interval_s`, `count` times, or forever if `count` is None.

    `check` is called between polls, and may raise an exception to end them. A slow answer delays the next poll.
    """
    for asked in itertools.count(1):
        next_at = time.monotonic() + interval_s
        yield
        if asked == count:
            return
        check()
        time.sleep(max(0.0, next_at - time.monotonic()))
        check()


def _show(poll: Poll, output: str, ticks: Iterator[None]) -> None:
    if output == "json":
        _print_json_lines(poll, ticks)
        return
    console = make_console()
    if is_terminal() and not console.is_dumb_terminal:
        with Live(Screen(lambda: poll.view), console=console, screen=True, refresh_per_second=FRAMES_PER_S) as live:
            for _ in ticks:
                poll.ask()
                live.refresh()
        print_lines(console, poll.view.lines(console.width, console.height, time.time()))
        return
    for _ in ticks:
        view = poll.ask()
        stamp = Text(time.strftime("-- %H:%M:%S --", time.localtime(view.asked_at)))
        print_lines(console, [stamp, *view.lines(console.width, PLAIN_LINES, time.time())])


def _print_json_lines(poll: Poll, ticks: Iterator[None]) -> None:
    """Print each answer as a JSON line to stdout, and each new error to stderr."""
    last_error = ""
    for _ in ticks:
        view = poll.ask()
        if view.error and view.error != last_error:
            click.echo(f"Error: {printable(view.error)}", err=True)
        last_error = view.error
        if view.status is not None and not view.error:
            click.echo(json.dumps(view.status, default=dataclasses.asdict))
            sys.stdout.flush()


@contextmanager
def _restoring_terminal() -> Generator[Callable[[], None], None, None]:
    """Turn SIGINT and SIGTERM into exceptions inside the `with` block, so that `finally` restores the terminal.

    A finalizer or a gRPC callback may swallow the exception. So the caller must regularly call the yielded function,
    which raises it again.
    """
    told: list[int] = []

    def check() -> None:
        if told:
            raise KeyboardInterrupt if told[-1] == signal.SIGINT else SystemExit(128 + told[-1])

    def leave(number: int, _: FrameType | None) -> None:
        told.append(number)
        check()

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
