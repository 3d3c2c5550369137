"""`lighthouse doctor`: whether a lighthouse can be used from this host, and if not, what to do."""

import dataclasses

import click
from rich.text import Text

from lighthouse.cli.doctor.gather import gather
from lighthouse.cli.doctor.rules.checkup import Finding, Level, check, is_healthy
from lighthouse.cli.options import ClientOptions, client_options
from lighthouse_runtime.cli.terminal import printable

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@click.command()
@client_options(job_help="Check only the managers of this job.  [default: all jobs]")
@click.pass_context
def doctor(ctx: click.Context, given: ClientOptions) -> None:
    """Check that this host can use the lighthouse.

    Checks address, TLS, token, clock, versions, store and managers: one line each, with the remedy if something is
    wrong. Exit status 1 if a check fails. Each check takes at most --timeout.
    """
    findings = check(gather(given.coordinator, given.status, given.timeout))
    document = {"is_healthy": is_healthy(findings), "findings": list(map(dataclasses.asdict, findings))}
    given.show(document, lambda width: list(map(finding_line, findings)))
    ctx.exit(0 if is_healthy(findings) else 1)


def finding_line(finding: Finding) -> Text:
    style = _STYLES[finding.level]
    return Text.assemble((f"{finding.level:<4}", style), f"  {finding.check:<10}  {printable(finding.text)}")
