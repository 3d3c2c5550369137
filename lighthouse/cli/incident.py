"""`lighthouse incident`: all that is known of one."""

from collections.abc import Iterator

import click
from rich.text import Text

from lighthouse.cli.incidents import clock
from lighthouse.cli.options import ClientOptions, client_options
from lighthouse.cli.view.evidence import gathered_lines
from lighthouse.cli.view.tables import wrapped
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentKind, IncidentSummary, to_document
from lighthouse_runtime.cli.terminal import printable


@click.command()
@click.argument("id", metavar="ID")
@client_options(job_help="Ignored: an ID names its job.", timeout="10s")
def incident(given: ClientOptions, id: str) -> None:
    """Show an incident: its timeline and what each rank was doing.

    Suspects come first. `lighthouse incidents` lists the IDs.
    """
    with given.connect() as client:
        found = client.incident(id, timeout_s=given.timeout)
    given.show(to_document(found), lambda width: lines_of(found, width))


def lines_of(incident: Incident, width: int) -> Iterator[Text]:
    summary = incident.summary
    title = Text.assemble((summary.id, "bold"), f"  {summary.kind.value}  job {printable(summary.job)}")
    yield from wrapped(title, width)
    yield from wrapped(Text(printable(summary.text), style="red"), width)
    yield Text()
    for after_s, what in _story(summary):
        first, *more = wrapped(Text(printable(what)), width - 12)
        yield Text.assemble(f"{after_s:+10.2f}s ", first)
        for line in more:
            yield Text.assemble(" " * 12, line)
    yield Text()
    behind = summary.suspects if summary.kind is IncidentKind.STALL else ()
    yield from gathered_lines(Gathered(incident.evidence, incident.missing), behind)


_FAULTS = {
    IncidentKind.STALL: "the fault: the last progress",
    IncidentKind.LOSS: "the fault: the last heartbeat",
}


def _story(summary: IncidentSummary) -> list[tuple[float, str]]:
    """In the order in which it happened."""
    is_of_run = summary.kind in (IncidentKind.RESTART, IncidentKind.EXIT)
    formed = "generation" if is_of_run else "quorum"
    happened = [
        (0.0, _FAULTS.get(summary.kind, "the fault")),
        (summary.noticed_s, f"noticed, at {clock(summary.opened_unix_s)}"),
        (summary.evidence_s, "evidence collected"),
        (summary.acted_s, summary.action),
        (summary.quorum_s, f"{formed} {summary.quorum_id} formed"),
        (summary.over_s, "progress resumed"),
        (summary.step_s, "first step committed"),
        (summary.back_s, f"back in the quorum: {', '.join(summary.suspects)}"),
    ]
    return sorted(((at, what) for at, what in happened if at is not None), key=lambda line: line[0])
