"""`lighthouse stop` and `lighthouse resume`: end a run for all of it, and lift that."""

import json

import click

from lighthouse.cli.run_options import RunChoice, run_options


@click.command()
@click.option("--reason", metavar="TEXT", default="", help="Why; every supervisor and rank of the run is told.")
@run_options(has_control=True)
def stop(choice: RunChoice, reason: str) -> None:
    """Stop a run: its supervisors end their workers and restart nothing, until it is resumed.

    It holds for this run id, also over a restart of the lighthouse, and for no other.
    """
    with choice.connect() as client:
        client.stop_run(reason, timeout_s=choice.timeout)
    _say(choice, f"run {choice.run} of job {choice.job} is stopped", reason=reason, stopped=True)


@click.command()
@run_options(has_control=True)
def resume(choice: RunChoice) -> None:
    """Lift the stop of a run and let excluded hosts in again. Supervisors that it ended must be started again."""
    with choice.connect() as client:
        was_held = any(
            run.stop is not None or run.excluded for run in client.runs(choice.run, timeout_s=choice.timeout)
        )
        client.resume_run(timeout_s=choice.timeout)
    said = "is resumed" if was_held else "was not stopped, and excludes no host: nothing was to be resumed"
    _say(choice, f"run {choice.run} of job {choice.job} {said}", resumed=was_held)


def _say(choice: RunChoice, text: str, **done: object) -> None:
    told = {"job": choice.job, "run": choice.run} | done
    click.echo(json.dumps(told) if choice.output == "json" else text)
