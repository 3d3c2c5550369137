"""`lighthouse drain`: let a replica group go in good order."""

import click

from lighthouse.cli.control import Control, control_options


@click.command()
@control_options
def drain(to: Control) -> None:
    """Ask the replica group REPLICA_ID to leave after the step that the others count on it for.

    Returns when it has been asked; `lighthouse members` shows when it has gone.
    """
    with to.connect() as client:
        client.drain(to.replica_id, to.reason, timeout_s=to.timeout)
    to.say(f"replica group {to.replica_id} of job {to.job} drains", draining=True)
