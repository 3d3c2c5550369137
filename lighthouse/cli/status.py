"""`lighthouse status`: whether jobs make progress, and if not, why."""

import click
from rich.text import Text

from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options
from lighthouse.cli.view.tables import greeting, status_lines, wrapped
from lighthouse_protocol.messages.status import LighthouseStatus
from lighthouse_runtime.cli.terminal import printable


@click.command()
@client_options(job_help=EVERY_JOB)
def status(given: ClientOptions) -> None:
    """Show whether each job makes progress, and if not, why."""
    answer = given.status(ranks=given.output == "json")  # a program gets what /status gives
    given.show(answer, lambda width: _lines(given, answer, width))


def _lines(given: ClientOptions, answer: LighthouseStatus, width: int) -> list[Text]:
    jobs = sorted({given.job_name, *(shown.job for shown in answer.jobs)})
    stopped = [line for job in jobs for line in _stopped(given, job)]
    last = [*stopped, Text(greeting(answer, given.address), style="dim")]
    return [*status_lines(answer, width), *(line for text in last for line in wrapped(text, width))]


def _stopped(given: ClientOptions, job: str) -> list[Text]:
    """A line for each run that is stopped: its ranks ask for nothing, and no supervisor starts them."""
    with given.connect(job) as client:
        runs = client.runs(timeout_s=given.timeout)
    return [
        Text(
            printable(
                f"run {run.run} of job {job} is stopped: {run.stop.text}; undo it with `lighthouse resume "
                f"--run {run.run}`"
            ),
            style="red",
        )
        for run in runs
        if run.stop is not None
    ]
