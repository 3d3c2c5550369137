"""What every client verb shares: its options, its connection and how an error ends it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, LIGHTHOUSE_PORT
from lighthouse_protocol.messages.status import LighthouseStatus
from lighthouse_protocol.refusals import InvalidRequest, UnknownName
from lighthouse_runtime.cli.durations import Duration
from lighthouse_runtime.client.lighthouse import LighthouseClient

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

EXAMPLE = f"write HOST:PORT, for example coordinator:{LIGHTHOUSE_PORT}"


token_option = click.option(
    "--control-token-file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="LIGHTHOUSE_CONTROL_TOKEN_FILE",
    show_envvar=True,
    help="The token that a lighthouse on another host asks for.",
)


def connect(address: str, *, job: str = "", token: str | None = None, run: str = DEFAULT_RUN) -> LighthouseClient:
    return LighthouseClient(address, job=job or DEFAULT_JOB, run=run, token=token)


def ask(address: str, job: str, timeout_s: float, *, ranks: bool = False) -> LighthouseStatus:
    """Of `job`, or of every job; `ranks`: with the place of every rank. Raises UnknownName where there is no such
    job."""
    with connect(address) as client:
        answer = client.status(job, ranks=ranks, timeout_s=timeout_s)
    if job and not answer.jobs:
        raise UnknownName(f"--job {job}: no such job at {address}; `lighthouse status` lists them all")
    return answer


def client_options(*, job_help: str, timeout: str = "5s") -> Callable[[F], F]:
    """--lighthouse, --job, --format and --timeout, as `address`, `job`, `output` and `timeout`."""
    options = (
        click.option(
            "--lighthouse",
            "address",
            metavar="HOST:PORT",
            envvar=["LIGHTHOUSE_ADDRESS", "TORCHFT_LIGHTHOUSE"],
            show_envvar=True,
            default=f"localhost:{LIGHTHOUSE_PORT}",
            show_default=True,
            callback=_read_address,
            help="The lighthouse to ask; http:// in front is accepted.",
        ),
        click.option("--job", metavar="NAME", default="", help=job_help),
        click.option(
            "--format",
            "output",
            type=click.Choice(["table", "json"]),
            default="table",
            show_default=True,
            help="Text for a person, or JSON.",
        ),
        click.option(
            "--timeout", type=Duration(), default=timeout, show_default=True, help="How long to wait for an answer."
        ),
    )
    return lambda function: functools.reduce(lambda inner, option: option(inner), reversed(options), function)


def _read_address(ctx: click.Context, param: click.Parameter, value: str) -> str:
    text = value.strip()
    if text.startswith("https://"):
        raise click.BadParameter(f"{text!r}: the lighthouse speaks no TLS here; {EXAMPLE}", ctx, param)
    try:
        parsed = parse_address(text, "address")
    except InvalidRequest as e:
        raise click.BadParameter(f"{str(e).removeprefix('address: ')}; {EXAMPLE}", ctx, param) from None
    if parsed.port == 0:
        raise click.BadParameter(f"{text!r}: port 0 is not a port to connect to; {EXAMPLE}", ctx, param)
    return str(Address(parsed.host, parsed.port or LIGHTHOUSE_PORT))
