"""`lighthouse status`: why there is, or is not, a quorum."""

import click
from rich.text import Text

from lighthouse.cli.options import ask, client_options, connect
from lighthouse.cli.view.output import make_console, print_json, print_lines
from lighthouse.cli.view.tables import greeting, job_lines
from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_runtime.cli.terminal import printable, reports_errors


@click.command()
@client_options(job_help="Only this job; without it, every job.")
@reports_errors
def status(address: str, job: str, output: str, timeout: float) -> None:
    """Show each job's quorum, and why there is or is not one."""
    answer = ask(address, job, timeout)
    if output == "json":
        return print_json(answer)
    console = make_console()
    lines = job_lines(answer.jobs, console.width) if answer.jobs else [Text("no jobs: no replica group has joined")]
    stopped = _stopped(address, sorted({job or DEFAULT_JOB, *(shown.job for shown in answer.jobs)}), timeout)
    return print_lines(console, [Text(greeting(answer, address)), *lines, *stopped])


def _stopped(address: str, jobs: list[str], timeout: float) -> list[Text]:
    """A line for each run that is stopped: its ranks ask for nothing, and no supervisor starts them."""
    lines: list[Text] = []
    for job in jobs:
        with connect(address, job=job) as client:
            found = [run for run in client.runs(timeout_s=timeout) if run.stop is not None]
        for run in found:
            assert run.stop is not None
            said = f"run {run.run} of job {job} is stopped: {run.stop.reason} (by {run.stop.who})"
            lines.append(Text(printable(f"{said}; `lighthouse resume --run {run.run}` lifts it"), style="red"))
    return lines
