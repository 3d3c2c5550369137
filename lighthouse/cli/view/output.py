"""How the client verbs write text to stdout."""

import io
import os
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

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
