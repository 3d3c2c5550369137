"""`lighthouse kill`: end a replica group through its manager."""

import click

from lighthouse.cli.control import Control, control_options


@click.command()
@control_options
def kill(to: Control) -> None:
    """End the replica group REPLICA_ID through its manager."""
    with to.connect() as client:
        client.kill(to.replica_id, to.message, timeout_s=to.timeout)
    to.say(f"killed replica group {to.replica_id} of job {to.job}", killed=True)
