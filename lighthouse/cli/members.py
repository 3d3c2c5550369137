"""`lighthouse members`: every replica group."""

import click
from rich.text import Text

from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options
from lighthouse.cli.view.tables import member_lines, member_rows


@click.command()
@client_options(job_help=EVERY_JOB)
def members(given: ClientOptions) -> None:
    """List the replica groups."""
    answer = given.status()
    rows = member_rows(answer)
    given.show(answer, lambda width: member_lines(rows, width) if rows else [Text("no members")])
