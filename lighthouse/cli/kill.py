"""`lighthouse kill`: end a replica group through its manager."""

import sys

import click

from lighthouse.cli.options import ClientOptions, control_options
from lighthouse_protocol.identity import split_replica_id
from lighthouse_protocol.messages.status import LighthouseStatus, MemberState


@click.command()
@click.option("--force", "-f", is_flag=True, help="Do not ask, even if it is the last live replica group of the job.")
@control_options
def kill(given: ClientOptions, replica_id: str, reason: str, force: bool) -> None:
    """Kill a replica group through its manager."""
    with given.connect() as client:
        if not force and _is_last(client.status(given.job_name, timeout_s=given.timeout), replica_id):
            _ask_person(f"{replica_id} is the last live replica group of job {given.job_name}")
        client.kill(replica_id, reason, timeout_s=given.timeout)
    said = f"killed replica group {replica_id} of job {given.job_name}"
    given.confirm(said, replica_id=replica_id, reason=reason, killed=True)


def _is_last(status: LighthouseStatus, replica_id: str) -> bool:
    alive = {m.replica_id for job in status.jobs for m in job.members if m.state is not MemberState.EXPIRED}
    return alive in ({replica_id}, {split_replica_id(replica_id)[0]})  # torchft writes name:uuid


def is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask_person(last: str) -> None:
    if not is_terminal():
        raise click.ClickException(
            f"{last}, and training stops with it; nothing was killed. Give --force, or drain it: `lighthouse drain`"
        )
    click.confirm(f"{last}, and training stops with it. Kill it?", abort=True, err=True)
