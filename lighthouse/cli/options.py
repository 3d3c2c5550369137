"""What every client verb shares: its options, its connection, how it answers and how an error ends it."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from lighthouse.cli.view.output import make_console, print_lines
from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, LIGHTHOUSE_PORT
from lighthouse_protocol.messages.status import LighthouseStatus
from lighthouse_protocol.refusals import InvalidRequest, UnknownName
from lighthouse_runtime.cli.durations import Duration
from lighthouse_runtime.cli.settings import read_token
from lighthouse_runtime.cli.terminal import reports_errors
from lighthouse_runtime.client.lighthouse import LighthouseClient

Verb = Callable[..., None]

EXAMPLE = f"write HOST:PORT, for example coordinator:{LIGHTHOUSE_PORT}"
EVERY_JOB = "Only this job; without it, every job."


@dataclasses.dataclass(frozen=True, slots=True)
class ClientOptions:
    """What was typed. An empty `job` or `run` means all of them where a verb can show several."""

    address: str
    job: str
    output: str
    timeout: float
    control_token_file: Path | None = None
    run: str = ""

    @property
    def job_name(self) -> str:
        return self.job or DEFAULT_JOB

    def connect(self, job: str | None = None) -> LighthouseClient:
        token = read_token(self.control_token_file)
        return LighthouseClient(self.address, job=job or self.job_name, run=self.run or DEFAULT_RUN, token=token)

    def status(self, *, ranks: bool = False) -> LighthouseStatus:
        """Of the job, or of every job; `ranks`: with the place of every rank.

        Raises UnknownName where there is no such job.
        """
        with self.connect(DEFAULT_JOB) as client:
            answer = client.status(self.job, ranks=ranks, timeout_s=self.timeout)
        if self.job and not answer.jobs:
            raise UnknownName(f"--job {self.job}: no such job at {self.address}; `lighthouse status` lists them all")
        return answer

    def show(self, document: Any, lines: Callable[[int], Iterable[Text]]) -> None:
        """`document`, a dataclass or what JSON knows, for a program; `lines` of a width for a person."""
        if self.output == "json":
            return click.echo(json.dumps(document, indent=2, default=dataclasses.asdict))
        console = make_console()
        return print_lines(console, lines(console.width))

    def confirm(self, text: str, **done: object) -> None:
        """That it was done: `text` for a person, `done` for a program."""
        click.echo(json.dumps({"job": self.job_name} | done) if self.output == "json" else text)


def client_options(*, job_help: str, timeout: str = "5s", has_token: bool = False) -> Callable[[Verb], Verb]:
    """--lighthouse, --job, --format and --timeout, as ClientOptions: the verb's first argument."""
    token = click.option(
        "--control-token-file",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="LIGHTHOUSE_CONTROL_TOKEN_FILE",
        show_envvar=True,
        help="The token that a lighthouse on another host asks for.",
    )
    options = (
        *((token,) if has_token else ()),
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
    return lambda verb: _with_options(options, _takes_client_options(verb))


def control_options(verb: Verb) -> Verb:
    """REPLICA_ID, --reason and the client options of a verb that acts on one replica group."""
    options = (
        click.argument("replica_id"),
        click.option("--reason", metavar="TEXT", default="", help="The reason; it goes to the replica group's log."),
        client_options(job_help=f"The replica group's job.  [default: {DEFAULT_JOB}]", timeout="10s", has_token=True),
    )
    return _with_options(options, verb)


def run_options(*, default: str | None = DEFAULT_RUN, has_control: bool = False) -> Callable[[Verb], Verb]:
    """--run and the client options. `default` None: without --run, every run."""
    run_help = "The run, as given to its supervisors by --run-id."
    more = "  [default: every run of the job]" if default is None else f"  [default: {default}]"
    options = (
        click.option("--run", metavar="ID", default=default or "", help=run_help + more),
        client_options(
            job_help=f"The run's job.  [default: {DEFAULT_JOB}]",
            timeout="10s" if has_control else "5s",
            has_token=has_control,
        ),
    )
    return lambda verb: _with_options(options, verb)


def _with_options(options: Iterable[Callable[[Verb], Verb]], verb: Verb) -> Verb:
    """The first of `options` is the first in the help."""
    return functools.reduce(lambda inner, option: option(inner), reversed(tuple(options)), verb)


def _takes_client_options(verb: Verb) -> Verb:
    names = [field.name for field in dataclasses.fields(ClientOptions)]

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        given = ClientOptions(**{name: values.pop(name) for name in names if name in values})
        verb(given, **values)

    return reports_errors(run)


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
