"""`lighthouse drain`: let a replica group go in good order."""

import click

from lighthouse.cli.options import ClientOptions, control_options


@click.command()
@control_options
def drain(given: ClientOptions, replica_id: str, reason: str) -> None:
    """Ask a replica group to leave after its current step.

    Returns as soon as the group has the request; `lighthouse members` shows when it has left.
    """
    with given.connect() as client:
        client.drain(replica_id, reason, timeout_s=given.timeout)
    said = f"replica group {replica_id} of job {given.job_name} is draining"
    given.confirm(said, replica_id=replica_id, reason=reason, draining=True)
