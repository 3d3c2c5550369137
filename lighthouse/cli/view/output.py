"""How the client verbs write to stdout: text for a person, JSON for a program."""

import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterable

import click
from rich.console import Console
from rich.text import Text

from lighthouse_protocol.messages.status import LighthouseStatus

UNBOUNDED = 100_000


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """As wide as the terminal; elsewhere unbounded, so that a pipe gets every character."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    is_bounded = is_terminal() or "COLUMNS" in os.environ
    return _Console(highlight=False, width=None if is_bounded else UNBOUNDED)


def is_terminal() -> bool:
    """Whether a person looks at stdout."""
    return bool(sys.stdout) and sys.stdout.isatty()


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    console.print(Text("\n").join(lines), soft_wrap=True)


def print_json(status: LighthouseStatus, *, indent: int | None = 2) -> None:
    click.echo(json.dumps(dataclasses.asdict(status), indent=indent))
