"""`lighthouse stop` and `lighthouse resume`: end a run for all of it, and lift that."""

import click

from lighthouse.cli.options import ClientOptions, run_options


@click.command()
@click.option("--reason", metavar="TEXT", default="", help="Reason, for all supervisors and ranks of the run.")
@run_options(has_control=True)
def stop(given: ClientOptions, reason: str) -> None:
    """Stop a run until it is resumed.

    Its supervisors end their workers and restart nothing. The stop applies to this run ID only and survives a restart
    of the lighthouse.
    """
    with given.connect() as client:
        client.stop_run(reason, timeout_s=given.timeout)
    given.confirm(f"run {given.run} of job {given.job_name} is stopped", run=given.run, reason=reason, stopped=True)


@click.command()
@run_options(has_control=True)
def resume(given: ClientOptions) -> None:
    """Undo `stop` and re-admit excluded hosts.

    Start the supervisors that `stop` ended again yourself.
    """
    with given.connect() as client:
        was_held = any(run.stop is not None or run.excluded for run in client.runs(given.run, timeout_s=given.timeout))
        client.resume_run(timeout_s=given.timeout)
    said = "is resumed" if was_held else "was not stopped and excludes no host; nothing to resume"
    given.confirm(f"run {given.run} of job {given.job_name} {said}", run=given.run, resumed=was_held)
