"""Terminal input and output of the commands: errors, closed pipes, durations, and the output format."""

import functools
import math
import os
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from lighthouse_protocol.refusals import LighthouseError

P = ParamSpec("P")


def printable(text: str) -> str:
    """Replace characters that could control the terminal with question marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def drop_stdout() -> None:
    """Redirect stdout and its buffered output to /dev/null. Call this after a write to stdout has failed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def reports_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Decorate a verb so that a LighthouseError prints `Error: ...` and exits with 1. A closed pipe exits with 0."""

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


# Durations such as 500ms, 5s, 2m and 1h. A number without a unit means seconds.

if TYPE_CHECKING:
    _ParamType = click.ParamType[float]
else:
    _ParamType = click.ParamType  # not generic before click 8.3

_UNITS = {"ms": Decimal("0.001"), "": Decimal(1), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_DURATION = re.compile(r"(-?[0-9]{1,18}(?:\.[0-9]{1,18})?) ?(ms|s|m|h|)")


def parse_duration(text: str) -> float:
    """Parse a duration, such as 500ms or 2m, into seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write for example 500ms, 5s or 2m")
    return float(Decimal(match[1]) * _UNITS[match[2]])


def format_duration(seconds: float) -> str:
    """Format a duration for a table, in at most two units: 0.4s, 12s, 3m12s, 2h05m, 4d03h."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


class Milliseconds(_ParamType):
    """A click type for torchft's options in milliseconds. The value is a finite float above 0."""

    name = "milliseconds"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number <= 0:
            self.fail(f"{value!r} is not a number of milliseconds above 0, for example 60000", param, ctx)
        return number


class Duration(_ParamType):
    """A click type for durations. The value is a finite float in seconds above 0."""

    name = "duration"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = parse_duration(value) if isinstance(value, str) else float(value)
        except ValueError as e:
            self.fail(str(e), param, ctx)
        if not math.isfinite(seconds) or seconds <= 0:
            self.fail(f"{value!r} must be more than 0, for example 500ms, 5s or 2m", param, ctx)
        return seconds


# Output format: --format, and --json as its short form.

F = TypeVar("F", bound=Callable[..., object])

_JSON = "lighthouse.json"


def format_options(verb: F) -> F:
    """Add --format and --json to a verb, as its parameter `output`: "table" or "json"."""
    format_ = click.option(
        "--format",
        "output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        callback=lambda ctx, _, value: "json" if ctx.meta.get(_JSON) else value,
        help="Output format.",
    )
    short = click.option(
        "--json", is_flag=True, is_eager=True, expose_value=False, callback=_remember, help="Short for --format json."
    )
    return format_(short(verb))


def _remember(ctx: click.Context, _: click.Parameter, value: Any) -> None:
    """Remember that --json was given. The option is eager, so click calls this before it handles --format."""
    if value:
        ctx.meta[_JSON] = True
