"""What the verbs share that ask about one run, or act on it: which one, and how it is shown."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lighthouse.cli.options import client_options, connect, token_option
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN
from lighthouse_runtime.cli.settings import read_token
from lighthouse_runtime.cli.terminal import reports_errors
from lighthouse_runtime.client.lighthouse import LighthouseClient


@dataclass(frozen=True, slots=True)
class RunChoice:
    """What was typed. `run` may be empty where every run of the job is meant."""

    run: str
    address: str
    job: str
    output: str
    timeout: float
    control_token_file: Path | None = None

    def connect(self) -> LighthouseClient:
        token = read_token(self.control_token_file)
        return connect(self.address, job=self.job, run=self.run or DEFAULT_RUN, token=token)


def run_options(*, default: str | None = DEFAULT_RUN, has_control: bool = False) -> Callable[[Any], Any]:
    """--run and the options of such a verb, as the first argument. `default` None: without --run, every run."""
    run_help = "The run, as given to its supervisors by --run-id."
    more = "  [default: every run of the job]" if default is None else f"  [default: {default}]"
    options = (
        click.option("--run", metavar="ID", default=default or "", help=run_help + more),
        *((token_option,) if has_control else ()),
        client_options(job_help=f"The run's job.  [default: {DEFAULT_JOB}]", timeout="10s" if has_control else "5s"),
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run_it(
            run: str,
            address: str,
            job: str,
            output: str,
            timeout: float,
            control_token_file: Path | None = None,
            **more: Any,
        ) -> None:
            choice = RunChoice(run, address, job or DEFAULT_JOB, output, timeout, control_token_file)
            function(choice, **more)

        return functools.reduce(lambda inner, option: option(inner), reversed(options), reports_errors(run_it))

    return decorate
