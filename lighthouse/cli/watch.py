"""`lighthouse watch`: the status again and again, in place on a terminal, block by block elsewhere."""

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options
from lighthouse.cli.view.frame import Screen, View
from lighthouse.cli.view.output import is_terminal, make_console, print_lines
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.cli.durations import Duration
from lighthouse_runtime.cli.terminal import printable

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
        with _orderly_leave() as check:
            _show(poll, Rhythm(interval, count, check), given.output)
    except KeyboardInterrupt:
        return
    if poll.view.error:
        sys.exit(1)


class Poll:
    """Asks, and keeps the last answer."""

    def __init__(self, given: ClientOptions) -> None:
        self._given = given
        self.view: View = View(given.address, asked_at=time.time())

    def begin(self) -> None:
        self.view = dataclasses.replace(self.view, asked_at=time.time())

    def finish(self) -> View:
        view = self.view
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


@dataclasses.dataclass(frozen=True, slots=True)
class Rhythm:
    """Ask every `interval_s`, `count` times (None: for ever), until `check` raises."""

    interval_s: float
    count: int | None
    check: Callable[[], None]


def _show(poll: Poll, rhythm: Rhythm, output: str) -> None:
    if output == "json":
        return _repeat(poll, rhythm, _JsonLines().print)
    console = make_console()
    if is_terminal() and not console.is_dumb_terminal:
        return _live(poll, rhythm, console)
    return _repeat(poll, rhythm, lambda view: _print_block(view, console))


def _repeat(poll: Poll, rhythm: Rhythm, show: Callable[[View], None]) -> None:
    """An answer that takes longer than the interval delays the next question, and none is made up for."""
    asked = 0
    while True:
        next_at = time.monotonic() + rhythm.interval_s
        poll.begin()
        show(poll.finish())
        asked += 1
        if asked == rhythm.count:
            return
        rhythm.check()
        time.sleep(max(0.0, next_at - time.monotonic()))
        rhythm.check()


def _live(poll: Poll, rhythm: Rhythm, console: Console) -> None:
    screen = Screen(lambda: poll.view)
    with Live(screen, console=console, screen=True, refresh_per_second=FRAMES_PER_S) as live:
        _repeat(poll, rhythm, lambda _: live.refresh())
    print_lines(console, poll.view.lines(console.width, console.height, time.time()))


def _print_block(view: View, console: Console) -> None:
    stamp = Text(time.strftime("-- %H:%M:%S --", time.localtime(view.asked_at)))
    print_lines(console, [stamp, *view.lines(console.width, PLAIN_LINES, time.time())])


class _JsonLines:
    """Answers go to stdout; that there is none goes to stderr, when it changes."""

    def __init__(self) -> None:
        self._error = ""

    def print(self, view: View) -> None:
        if view.error and view.error != self._error:
            click.echo(f"Error: {printable(view.error)}", err=True)
        self._error = view.error
        if view.status is not None and not view.error:
            click.echo(json.dumps(view.status, default=dataclasses.asdict))
            sys.stdout.flush()


@contextmanager
def _orderly_leave() -> Generator[Callable[[], None], None, None]:
    """A terminal must be put back in order, however the process is told to end.

    Where the exception that a signal raises falls into code that swallows it (a finalizer, a callback of gRPC's), the
    function that this gives raises it again.
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
