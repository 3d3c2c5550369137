"""`lighthouse runs`: what each run is at, and whether it is over."""

from collections.abc import Iterator

import click
from rich.text import Text

from lighthouse.cli.options import ClientOptions, run_options
from lighthouse.cli.view.layout import table
from lighthouse.cli.view.tables import SUPERVISOR_COLUMNS, counted, natural_key, supervised
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_runtime.cli.terminal import printable


@click.command()
@run_options(default=None)
def runs(given: ClientOptions) -> None:
    """List the runs, their supervised groups and restarts.

    A waiting run shows what it waits for, a stopped run who stopped it. LEFT is the number of restarts that a
    supervisor's budget still allows. `lighthouse incidents` lists why generations and processes ended.
    """
    with given.connect() as client:
        found = client.runs(given.run, timeout_s=given.timeout)
    given.show(found, lambda width: [line for run in found for line in run_lines(run, width)] or [Text("no runs")])


def run_lines(run: RunStatus, width: int) -> Iterator[Text]:
    yield _line(run)
    if supervisors := sorted(run.supervisors, key=lambda supervisor: natural_key(supervisor.name)):
        yield from (Text.assemble("  ", row) for row in table(SUPERVISOR_COLUMNS, supervisors, width - 2))


def _line(run: RunStatus) -> Text:
    number, counters = run.counters.number, run.counters
    at = f"generation {number}, {counted(len(run.slots), 'rank')}" if number >= 0 else "no generation yet"
    said = f"  {at}, {counted(counters.job_restarts, 'restart')}, {run.verdict}"
    if number < 0 and run.supervisors and run.stop is None:
        said = f"  {supervised(run)}"
    stop = run.stop
    by = "" if stop is None else f": {stop.text}"
    return Text.assemble((printable(f"{run.job}/{run.run}"), "bold"), printable(said), (printable(by), "red"))
