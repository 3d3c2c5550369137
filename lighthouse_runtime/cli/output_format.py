"""--format of every command that answers, and --json, which is short for --format json."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])

_JSON = "lighthouse.json"


def format_options(verb: F) -> F:
    """Both, as the parameter `output`: "table" or "json"."""
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
    """Eager options are read before the others, wherever they stand."""
    if value:
        ctx.meta[_JSON] = True
