"""`lighthouse stacks`: what ranks are doing now."""

import json
from pathlib import Path

import click

from lighthouse.cli.options import client_options, connect, token_option
from lighthouse.cli.view.evidence import gathered_lines
from lighthouse.cli.view.output import make_console, print_lines
from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_protocol.messages.incident import gathered_document
from lighthouse_runtime.cli.settings import read_token
from lighthouse_runtime.cli.terminal import reports_errors


@click.command()
@click.option(
    "--rank", "ranks", metavar="RANK", multiple=True, help="b/1, or b for all of that replica group; may be repeated."
)
@token_option
@client_options(job_help=f"The ranks' job.  [default: {DEFAULT_JOB}]", timeout="15s")
@reports_errors
def stacks(
    ranks: tuple[str, ...], control_token_file: Path | None, address: str, job: str, output: str, timeout: float
) -> None:
    """Show the Python stacks, the newest collectives, the process and the last output of every rank of the quorum.

    No rank is disturbed, and a rank that holds the interpreter lock is shown, too. What is missing is named.
    """
    with connect(address, job=job, token=read_token(control_token_file)) as client:
        gathered = client.stacks(ranks, timeout_s=timeout)
    if output == "json":
        return click.echo(json.dumps(gathered_document(gathered), indent=2))
    return print_lines(make_console(), gathered_lines(gathered))
