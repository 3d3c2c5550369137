"""`lighthouse status`: why there is, or is not, a quorum."""

import click
from rich.text import Text

from lighthouse.cli.options import ask, client_options
from lighthouse.cli.output import make_console, print_json, print_lines
from lighthouse.cli.tables import greeting, job_lines
from lighthouse_runtime.terminal import reports_errors


@click.command()
@client_options(job_help="Only this job; without it, every job.")
@reports_errors
def status(address: str, job: str, output: str, timeout: float) -> None:
    """Show each job's quorum, and why there is or is not one."""
    answer = ask(address, job, timeout)
    if output == "json":
        return print_json(answer)
    console = make_console()
    lines = job_lines(answer.jobs, console.width) if answer.jobs else [Text("no jobs: nobody has joined")]
    return print_lines(console, [Text(greeting(answer, address)), *lines])
