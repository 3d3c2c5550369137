"""How a command of ours ends: a refusal in one line on stderr, a reader that has read enough without a word."""

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

import click

from lighthouse_protocol.refusals import LighthouseError

P = ParamSpec("P")


def printable(text: str) -> str:
    """`text` with nothing in it that could move the cursor."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def drop_stdout() -> None:
    """The reader has gone: discard what is still buffered, and all that follows."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def reports_errors(function: Callable[P, None]) -> Callable[P, None]:
    """A refusal ends the verb with `Error: ...` and status 1; a reader that has read enough, with status 0."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
            if sys.stdout:
                sys.stdout.flush()
        except LighthouseError as e:
            raise click.ClickException(printable(str(e))) from e
        except BrokenPipeError:
            drop_stdout()
        except OSError as e:
            drop_stdout()
            raise click.ClickException(f"cannot write to stdout: {e.strerror or e}") from e

    return wrapper
