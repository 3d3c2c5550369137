"""`lighthouse drain`: let a replica group go in good order."""

import json
from pathlib import Path

import click

from lighthouse.cli.options import client_options, connect, token_option
from lighthouse_runtime.settings import read_token
from lighthouse_runtime.terminal import reports_errors
from protos.limits import DEFAULT_JOB


@click.command()
@click.argument("replica_id")
@click.option("--message", metavar="TEXT", default="", help="The reason; it goes to the replica group's log.")
@token_option
@client_options(job_help=f"The replica group's job.  [default: {DEFAULT_JOB}]", timeout="10s")
@reports_errors
def drain(
    replica_id: str,
    message: str,
    control_token_file: Path | None,
    address: str,
    job: str,
    output: str,
    timeout: float,
) -> None:
    """Ask the replica group REPLICA_ID to leave after the step that the others count on it for.

    Returns when it has been asked; `lighthouse members` shows when it has gone.
    """
    token = read_token(control_token_file)
    job = job or DEFAULT_JOB
    with connect(address, job=job, token=token) as client:
        client.drain(replica_id, message, timeout_s=timeout)
    done = {"job": job, "replica_id": replica_id, "message": message, "draining": True}
    click.echo(json.dumps(done) if output == "json" else f"replica group {replica_id} of job {job} drains")
