"""`lighthouse stacks`: what ranks are doing now."""

import click

from lighthouse.cli.options import ClientOptions, client_options
from lighthouse.cli.view.evidence import gathered_lines
from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_protocol.messages.incident import gathered_document


@click.command()
@click.option(
    "--rank",
    "ranks",
    metavar="RANK",
    multiple=True,
    help="b/1, or b for all its ranks. May be repeated.  [default: all]",
)
@client_options(job_help=f"Job of the ranks.  [default: {DEFAULT_JOB}]", timeout="15s")
def stacks(given: ClientOptions, ranks: tuple[str, ...]) -> None:
    """Show the Python stacks of all ranks, now.

    Also shows each rank's newest collectives, process and last output, and lists what could not be collected. Ranks are
    not interrupted. It works for a rank that holds the interpreter lock, too.
    """
    with given.connect() as client:
        gathered = client.stacks(ranks, timeout_s=given.timeout)
    given.show(gathered_document(gathered), lambda _: gathered_lines(gathered))
