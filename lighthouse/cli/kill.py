"""`lighthouse kill`: end a replica group through its manager."""

import sys

import click

from lighthouse.cli.control import Control, control_options
from lighthouse_protocol.identity import split_replica_id
from lighthouse_protocol.messages.status import LighthouseStatus, MemberState


@click.command()
@click.option("--force", "-f", is_flag=True, help="Do not ask, also where no other replica group of the job is alive.")
@control_options
def kill(to: Control, force: bool) -> None:
    """End the replica group REPLICA_ID through its manager."""
    with to.connect() as client:
        if not force and _is_last(client.status(to.job, timeout_s=to.timeout), to.replica_id):
            _confirm(to)
        client.kill(to.replica_id, to.reason, timeout_s=to.timeout)
    to.say(f"killed replica group {to.replica_id} of job {to.job}", killed=True)


def _is_last(status: LighthouseStatus, replica_id: str) -> bool:
    alive = {m.replica_id for job in status.jobs for m in job.members if m.state is not MemberState.EXPIRED}
    return alive in ({replica_id}, {split_replica_id(replica_id)[0]})  # torchft writes name:uuid


def is_terminal() -> bool:
    return sys.stdin.isatty()


def _confirm(to: Control) -> None:
    last = f"{to.replica_id} is the last live replica group of job {to.job}, and training stops with it"
    if not is_terminal():
        raise click.ClickException(f"{last}; nothing was killed. Give --force, or drain it: lighthouse drain")
    click.confirm(f"{last}. Kill it?", abort=True, err=True)
