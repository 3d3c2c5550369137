"""`lighthouse stacks`: what ranks are doing now."""

import click

from lighthouse.cli.options import ClientOptions, client_options
from lighthouse.cli.view.evidence import gathered_lines
from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_protocol.messages.incident import gathered_document


@click.command()
@click.option(
    "--rank", "ranks", metavar="RANK", multiple=True, help="b/1, or b for all of that replica group; may be repeated."
)
@client_options(job_help=f"The ranks' job.  [default: {DEFAULT_JOB}]", timeout="15s")
def stacks(given: ClientOptions, ranks: tuple[str, ...]) -> None:
    """Show what every rank of the quorum is doing now.

    That is its Python stacks, newest collectives, process and last output. Ranks are not interrupted. A rank that
    holds the interpreter lock is shown, too. Missing evidence is named.
    """
    with given.connect() as client:
        gathered = client.stacks(ranks, timeout_s=given.timeout)
    given.show(gathered_document(gathered), lambda _: gathered_lines(gathered))
