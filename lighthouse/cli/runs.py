"""`lighthouse runs`: what each run is at, and whether it is over."""

import click
from rich.text import Text

from lighthouse.cli.options import ClientOptions, run_options
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_runtime.cli.terminal import printable


@click.command()
@run_options(default=None)
def runs(given: ClientOptions) -> None:
    """List the runs with their generation, ranks and restarts.

    A run that waits says for what, and one that was stopped, by whom. `lighthouse incidents` lists why generations
    ended.
    """
    with given.connect() as client:
        found = client.runs(given.run, timeout_s=given.timeout)
    given.show(found, lambda width: [_line(run) for run in found] or [Text("no runs")])


def _line(run: RunStatus) -> Text:
    number, counters = run.counters.number, run.counters
    at = f"generation {number}, {len(run.slots)} ranks" if number >= 0 else "no generation yet"
    said = f"  {at}, {counters.job_restarts} restarts, {run.verdict}"
    stop = run.stop
    by = "" if stop is None else f": {stop.text}"
    return Text.assemble((printable(f"{run.job}/{run.run}"), "bold"), printable(said), (printable(by), "red"))
