"""Options, connection, output and error handling shared by all client verbs.

`client_options`, `control_options` and `run_options` are decorators that pass the parsed options to a verb as a
`ClientOptions`. gRPC and rich are imported only when needed, which keeps `--help` fast.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from lighthouse_protocol.coordinator import Coordinator, TlsFiles, parse_coordinator
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, LIGHTHOUSE_PORT
from lighthouse_protocol.refusals import InvalidRequest, UnknownName
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.cli import Duration, format_options, reports_errors
from lighthouse_runtime.security.client_tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE

if TYPE_CHECKING:
    from rich.text import Text

    from lighthouse_protocol.messages.status import LighthouseStatus
    from lighthouse_runtime.client.clients import LighthouseClient

Verb = Callable[..., None]

EXAMPLE = f"for example coordinator:{LIGHTHOUSE_PORT}"
_TLS_OPTIONS = (
    ("--tls-ca", CA_VARIABLE, "CA of the lighthouse's certificate, if you use your own PKI."),
    ("--client-cert", CERT_VARIABLE, "Client certificate for a lighthouse with --tls-client-ca."),
    ("--client-key", KEY_VARIABLE, "Private key of --client-cert."),
)
EVERY_JOB = "Show only this job.  [default: all jobs]"


@dataclasses.dataclass(frozen=True, slots=True)
class ClientOptions:
    """Values of the options that all client verbs share.

    An empty `job` or `run` means all jobs or runs for a verb that can show several.
    """

    coordinator: Coordinator
    job: str
    output: str
    timeout: float  # seconds
    run: str = ""

    @property
    def address(self) -> str:
        return str(self.coordinator)

    @property
    def job_name(self) -> str:
        return self.job or DEFAULT_JOB

    def connect(self, job: str | None = None, role: Role = Role.OPERATE) -> "LighthouseClient":
        # gRPC takes long to import, and --help does not need it
        from lighthouse_runtime.client.clients import LighthouseClient

        name, run = job or self.job_name, self.run or DEFAULT_RUN
        return LighthouseClient(self.coordinator, job=name, run=run, role=role)

    def status(self, *, ranks: bool = False) -> "LighthouseStatus":
        """Request the status of the job, or of all jobs without --job.

        Args:
            ranks: Whether to include the progress of each rank.

        Raises:
            UnknownName: If there is no such job.
        """
        with self.connect(DEFAULT_JOB) as client:
            answer = client.status(self.job, ranks=ranks, timeout_s=self.timeout)
        if self.job and not answer.jobs:
            raise UnknownName(f"--job {self.job}: no such job at {self.address}; `lighthouse status` lists them all")
        return answer

    def show(self, document: Any, lines: "Callable[[int], Iterable[Text]]") -> None:
        """Print `document` as JSON with --format json. Otherwise, print `lines` as text.

        Args:
            document: A value that JSON can represent. It may contain dataclasses.
            lines: Returns the lines for a given width.
        """
        if self.output == "json":
            return click.echo(json.dumps(document, indent=2, default=dataclasses.asdict))
        from lighthouse.cli.layout import make_console, print_lines  # rich, which JSON does not need

        console = make_console()
        return print_lines(console, lines(console.width))

    def confirm(self, text: str, **done: object) -> None:
        """Print the result of an action: with --format json, the job and the fields `done`; otherwise `text`."""
        click.echo(json.dumps({"job": self.job_name} | done) if self.output == "json" else text)


def client_options(*, job_help: str, timeout: str = "5s") -> Callable[[Verb], Verb]:
    """Return a decorator that adds --lighthouse, --job and the like to a verb, as one ClientOptions argument."""
    options = (
        click.option(
            "--lighthouse",
            "coordinator",
            metavar="HOST:PORT|JOIN-STRING",
            envvar=["LIGHTHOUSE_ADDRESS", "TORCHFT_LIGHTHOUSE"],
            show_envvar=True,
            default=f"localhost:{LIGHTHOUSE_PORT}",
            show_default=True,
            callback=read_coordinator,
            help="Address or join string of the lighthouse.",
        ),
        *(
            click.option(
                option,
                metavar="FILE",
                type=click.Path(exists=True, dir_okay=False),
                envvar=name,
                show_envvar=True,
                help=text,
            )
            for option, name, text in _TLS_OPTIONS
        ),
        click.option("--job", metavar="NAME", default="", help=job_help),
        format_options,
        click.option("--timeout", type=Duration(), default=timeout, show_default=True, help="Timeout of each request."),
    )
    return lambda verb: _with_options(options, _takes_client_options(verb))


def control_options(verb: Verb) -> Verb:
    """Decorate a verb that acts on a replica group: add the argument REPLICA_ID, --reason and the client options."""
    options = (
        click.argument("replica_id"),
        click.option("--reason", metavar="TEXT", default="", help="Reason, for the replica group's log."),
        client_options(job_help=f"Job of the replica group.  [default: {DEFAULT_JOB}]", timeout="10s"),
    )
    return _with_options(options, verb)


def run_options(*, default: str | None = DEFAULT_RUN, has_control: bool = False) -> Callable[[Verb], Verb]:
    """Return a decorator that adds --run and the client options to a verb.

    Args:
        default: Default for --run, or None for all runs.
        has_control: Whether the verb changes the run, which may take longer.
    """
    run_help = "ID of the run (--run-id of its supervisors)."
    more = "  [default: all runs of the job]" if default is None else f"  [default: {default}]"
    options = (
        click.option("--run", metavar="ID", default=default or "", help=run_help + more),
        client_options(
            job_help=f"Job of the run.  [default: {DEFAULT_JOB}]",
            timeout="10s" if has_control else "5s",
        ),
    )
    return lambda verb: _with_options(options, verb)


def _with_options(options: Iterable[Callable[[Verb], Verb]], verb: Verb) -> Verb:
    """Apply click decorators so that the help text lists the options in this order."""
    return functools.reduce(lambda inner, option: option(inner), reversed(tuple(options)), verb)


def _takes_client_options(verb: Verb) -> Verb:
    names = [field.name for field in dataclasses.fields(ClientOptions)]

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        files = TlsFiles(*(values.pop(name) or "" for name in ("tls_ca", "client_cert", "client_key")))
        values["coordinator"] = values["coordinator"].with_files(files)
        given = ClientOptions(**{name: values.pop(name) for name in names if name in values})
        verb(given, **values)

    return reports_errors(run)


def read_coordinator(ctx: click.Context, param: click.Parameter | None, value: str) -> Coordinator:
    text = value.strip()
    if text.startswith("https://"):
        why = "a lighthouse with TLS needs its join string, which `lighthouse token` prints, or --tls-ca"
        raise click.BadParameter(f"{text!r}: {why}; {EXAMPLE}", ctx, param)
    try:
        return parse_coordinator(text, "address")
    except InvalidRequest as e:
        raise click.BadParameter(f"{str(e).removeprefix('address: ')}; {EXAMPLE}", ctx, param) from None
