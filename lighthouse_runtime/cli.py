"""Command-line infrastructure: settings of daemons, lazily imported commands, durations and terminal output.

A frozen dataclass of settings defines options, environment variables and the reference documentation:

    @dataclass(frozen=True)
    class Config:
        join_timeout_s: float = setting(60.0, "How long ...", kind=Duration(), has_ms_alias=True)

defines `--join-timeout 60s`, the variable PREFIX_JOIN_TIMEOUT, and, for torchft, `--join_timeout_ms 60000`. Underscores
and dashes are interchangeable in option names.
"""

import dataclasses
import functools
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

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
    """Decorate a command so that a LighthouseError prints `Error: ...` and exits with status 1.

    If the program that reads the command's output has closed the pipe, the command exits with status 0.
    """

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
MAX_DURATION_S = 100 * 365 * 86400.0  # the system's clocks and timers accept no more than a few hundred years
_DURATION = re.compile(r"(-?[0-9]{1,18}(?:\.[0-9]{1,18})?) ?(ms|s|m|h|)")


def parse_duration(text: str) -> float:
    """Parse a duration, such as 500ms or 2m, into seconds. Raise ValueError if it is malformed."""
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
        if number > 1000 * MAX_DURATION_S:
            self.fail(f"{value!r} is too long; at most {1000 * MAX_DURATION_S:.0f} are allowed", param, ctx)
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
        if seconds > MAX_DURATION_S:
            self.fail(f"{value!r} is too long; at most {MAX_DURATION_S / 3600:.0f}h are allowed", param, ctx)
        return seconds


# Output format: --format, and --json as its short form.

F = TypeVar("F", bound=Callable[..., object])

_JSON = "lighthouse.json"


def format_options(verb: F) -> F:
    """Add the options --format and --json to a command, which receives "table" or "json" as its parameter `output`."""
    format_ = click.option(
        "--format",
        "output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        callback=lambda ctx, _, value: "json" if ctx.meta[_JSON] else value,
        help="Output format.",
    )
    short = click.option(
        "--json",
        is_flag=True,
        is_eager=True,  # so that click handles it before --format
        expose_value=False,
        callback=lambda ctx, _, value: ctx.meta.update({_JSON: value}),
        help="Short for --format json.",
    )
    return format_(short(verb))


# Settings.

C = TypeVar("C")

# Shared by all our commands; makes --min_replicas an alias of --min-replicas.
CONTEXT_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}


def setting(
    default: Any,
    text: str,
    *,
    kind: click.ParamType | type | None = None,
    env: Sequence[str] = (),
    has_ms_alias: bool = False,
    metavar: str | None = None,
) -> Any:
    """Define a field of a settings class.

    Args:
        default: Default value. dataclasses.MISSING makes the option required.
        text: Help text.
        kind: Type of the option's value, for click.
        env: Environment variables that are read if the field's own variable is not set.
        has_ms_alias: Whether the option has a hidden alias that takes milliseconds.
        metavar: Placeholder for the value in the help text.
    """
    about = {"text": text, "kind": kind, "env": tuple(env), "ms": has_ms_alias, "metavar": metavar}
    return dataclasses.field(default=default, metadata=about)


def option_name(field: dataclasses.Field[Any]) -> str:
    return "--" + _name(field).replace("_", "-")


def variables(field: dataclasses.Field[Any], prefix: str) -> list[str]:
    """Return the environment variables of a setting, in order of precedence. The first one starts with `prefix`."""
    return [f"{prefix}_{_name(field).upper()}", *field.metadata["env"]]


def _name(field: dataclasses.Field[Any]) -> str:
    # A suffix `_s` means seconds. Any other final `_` avoids a Python keyword.
    return field.name.removesuffix("_s").removesuffix("_")


def options(config: type[Any], prefix: str) -> Callable[[F], F]:
    """Return a decorator that adds the options of the settings class `config` to a click command.

    Each option can also be set by environment variables: one that starts with `prefix`, and others (see variables()).
    """

    def decorate(command: F) -> F:
        for field in reversed(dataclasses.fields(config)):
            if field.metadata["ms"]:
                alias = f"{option_name(field)}-ms"
                command = click.option(alias, f"{field.name}_ms", type=Milliseconds(), hidden=True)(command)
            command = _option(field, prefix)(command)
        return command

    return decorate


def from_options(config: type[C], values: dict[str, Any]) -> C:
    """Create a settings object from click's option values. Raise click.UsageError if they are inconsistent."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    chosen = {field.name: values[field.name] for field in fields}
    for field in fields:
        in_ms = values.get(f"{field.name}_ms")
        if in_ms is not None:
            chosen[field.name] = in_ms / 1000
    try:
        return config(**chosen)
    except ValueError as e:
        raise click.UsageError(str(e)) from None


class _Option(click.Option):
    """An option whose errors name the environment variables from which a wrong value may come."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        assert isinstance(self.envvar, list)
        return f"{super().get_error_hint(ctx)} (env: {', '.join(self.envvar)})"


def _option(field: dataclasses.Field[Any], prefix: str) -> Callable[[F], F]:
    about, is_required = field.metadata, field.default is dataclasses.MISSING
    names = variables(field, prefix)
    default: Any = field.default
    if field.name.endswith("_s") and not is_required and default is not None:
        default = f"{default:g}s"  # as a user would write it
    return click.option(
        option_name(field),
        field.name,
        cls=_Option,
        type=about["kind"],
        is_flag=field.default is False,
        required=is_required,
        **({} if is_required else {"default": default}),  # an explicit None would satisfy `required`
        show_default=not is_required and field.default is not None and field.default is not False,
        envvar=names,
        show_envvar=False,  # the help text names them
        metavar=about["metavar"],
        help=f"{about['text']}  [env: {', '.join(names)}]",
    )


class LazyCommand(NamedTuple):
    """Import path of a command, and its line and section in the group's help text."""

    where: str  # MODULE:NAME
    text: str  # line in the list of commands; a test compares it with the command's own
    section: str = "Commands"  # heading in the list of commands


class LazyGroup(click.Group):
    """A click group that imports a command only when it runs. `--help` and shell completion import no command."""

    def __init__(self, *args: Any, verbs: Mapping[str, LazyCommand], **more: Any) -> None:
        super().__init__(*args, **more)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (verb := self.verbs.get(cmd_name)) is None:
            return None
        module, _, attribute = verb.where.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, self.verbs))
        for title in dict.fromkeys(verb.section for verb in self.verbs.values()):
            verbs = [(name, verb) for name, verb in self.verbs.items() if verb.section == title]
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), verb.text) for name, verb in verbs])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        verbs = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=self.verbs[name].text) for name in verbs), *options]
