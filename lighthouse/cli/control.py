"""What the verbs share that act on one replica group: the group that is meant, why, and the line that confirms it."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lighthouse.cli.options import client_options, connect, token_option
from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_runtime.cli.settings import read_token
from lighthouse_runtime.cli.terminal import reports_errors
from lighthouse_runtime.client.lighthouse import LighthouseClient


@dataclass(frozen=True, slots=True)
class Control:
    """What was typed."""

    replica_id: str
    reason: str
    control_token_file: Path | None
    address: str
    job: str
    output: str
    timeout: float

    def connect(self) -> LighthouseClient:
        return connect(self.address, job=self.job, token=read_token(self.control_token_file))

    def say(self, text: str, **done: bool) -> None:
        """That it was done: `text` for a person, `done` for a program."""
        told = {"job": self.job, "replica_id": self.replica_id, "reason": self.reason} | done
        click.echo(json.dumps(told) if self.output == "json" else text)


def control_options(function: Callable[..., None]) -> Callable[..., None]:
    """REPLICA_ID and the options of such a verb, as the first argument; it may have more of its own."""

    @functools.wraps(function)
    def run(job: str, **options: Any) -> None:
        mine = {name: options.pop(name) for name in Control.__slots__ if name in options}
        function(Control(job=job or DEFAULT_JOB, **mine), **options)

    options = (
        click.argument("replica_id"),
        click.option("--reason", metavar="TEXT", default="", help="The reason; it goes to the replica group's log."),
        token_option,
        client_options(job_help=f"The replica group's job.  [default: {DEFAULT_JOB}]", timeout="10s"),
    )
    return functools.reduce(lambda inner, option: option(inner), reversed(options), reports_errors(run))
