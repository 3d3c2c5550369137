"""Verbs that change a job: `drain`, `kill`, `stop` and `resume`.

`drain` and `kill` act on one replica group, `stop` and `resume` on a run. `kill` asks for confirmation if the group is
the last live one of its job.
"""

import sys

import click

from lighthouse.cli.options import ClientOptions, control_options, run_options
from lighthouse_protocol.identity import split_replica_id
from lighthouse_protocol.messages.status import MemberState


@click.command()
@control_options
def drain(given: ClientOptions, replica_id: str, reason: str) -> None:
    """Ask a replica group to leave after its current step.

    Returns as soon as the group has received the request; `lighthouse members` shows when it has left.
    """
    with given.connect() as client:
        client.drain(replica_id, reason, timeout_s=given.timeout)
    said = f"replica group {replica_id} of job {given.job_name} is draining"
    given.confirm(said, replica_id=replica_id, reason=reason, draining=True)


@click.command()
@click.option(
    "--force",
    "-f",
    is_flag=True,
    help="Do not ask for confirmation, even if it is the last live replica group of the job.",
)
@control_options
def kill(given: ClientOptions, replica_id: str, reason: str, force: bool) -> None:
    """Kill a replica group through its manager."""
    with given.connect() as client:
        if not force:
            status = client.status(given.job_name, timeout_s=given.timeout)
            alive = {m.replica_id for job in status.jobs for m in job.members if m.state is not MemberState.EXPIRED}
            # torchft's replica ids are name:uuid
            if alive in ({replica_id}, {split_replica_id(replica_id)[0]}):
                _ask_person(f"{replica_id} is the last live replica group of job {given.job_name}")
        client.kill(replica_id, reason, timeout_s=given.timeout)
    said = f"killed replica group {replica_id} of job {given.job_name}"
    given.confirm(said, replica_id=replica_id, reason=reason, killed=True)


def is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask_person(last: str) -> None:
    if not is_terminal():
        raise click.ClickException(
            f"{last}, and training stops with it; nothing was killed. Give --force, or drain it: `lighthouse drain`"
        )
    click.confirm(f"{last}, and training stops with it. Kill it?", abort=True, err=True)


@click.command()
@click.option("--reason", metavar="TEXT", default="", help="Reason, for all supervisors and ranks of the run.")
@run_options(has_control=True)
def stop(given: ClientOptions, reason: str) -> None:
    """Stop a run until it is resumed.

    The run's supervisors end their workers and restart nothing. The stop applies to this run ID only, and a restart of
    the lighthouse does not lift it.
    """
    with given.connect() as client:
        client.stop_run(reason, timeout_s=given.timeout)
    given.confirm(f"run {given.run} of job {given.job_name} is stopped", run=given.run, reason=reason, stopped=True)


@click.command()
@run_options(has_control=True)
def resume(given: ClientOptions) -> None:
    """Undo `stop` and re-admit excluded hosts.

    It does not restart the supervisors that `stop` ended: start them yourself.
    """
    with given.connect() as client:
        was_held = any(run.stop is not None or run.excluded for run in client.runs(given.run, timeout_s=given.timeout))
        client.resume_run(timeout_s=given.timeout)
    said = "is resumed" if was_held else "was not stopped and excludes no host; nothing to resume"
    given.confirm(f"run {given.run} of job {given.job_name} {said}", run=given.run, resumed=was_held)
