"""`lighthouse members`: every replica group."""

import click
from rich.text import Text

from lighthouse.cli.options import ask, client_options
from lighthouse.cli.view.output import make_console, print_json, print_lines
from lighthouse.cli.view.tables import member_lines, member_rows
from lighthouse_runtime.cli.terminal import reports_errors


@click.command()
@client_options(job_help="Only this job; without it, every job.")
@reports_errors
def members(address: str, job: str, output: str, timeout: float) -> None:
    """List the replica groups, one a line."""
    answer = ask(address, job, timeout)
    if output == "json":
        return print_json(answer)
    console, rows = make_console(), member_rows(answer)
    return print_lines(console, member_lines(rows, console.width) if rows else [Text("no members")])
