"""The command `lighthouse`."""

import lighthouse_runtime.process.grpc_environment  # noqa: F401, I001  # pyright: ignore[reportUnusedImport]  before grpc

import click

from lighthouse_runtime.cli.lazy_commands import Lazy, LazyCommands, LazyGroup
from lighthouse_runtime.cli.settings import CONTEXT_SETTINGS
from lighthouse_protocol import VERSION

_VERBS = {
    "serve": Lazy("lighthouse.cli.serve:serve", "Serve on a coordinator host until SIGTERM."),
    "token": Lazy(
        "lighthouse.cli.token:token",
        "Print the join string of a role: for training hosts, for an operator, or for a viewer.",
    ),
    "status": Lazy(
        "lighthouse.cli.status:status",
        "Show each job's quorum, and why there is or is not one; and each run's generation and ranks.",
    ),
    "members": Lazy("lighthouse.cli.members:members", "List the replica groups, one a line."),
    "ranks": Lazy("lighthouse.cli.ranks:ranks", "List where every rank is, the ranks behind first."),
    "watch": Lazy("lighthouse.cli.watch:watch", "Show the status until Ctrl-C."),
    "stacks": Lazy("lighthouse.cli.stacks:stacks", "Show what every rank of the quorum is doing now."),
    "incidents": Lazy("lighthouse.cli.incidents:incidents", "List the newest incidents, the newest first."),
    "incident": Lazy(
        "lighthouse.cli.incident:incident", "Show an incident: its timeline, and what each rank was doing."
    ),
    "drain": Lazy("lighthouse.cli.drain:drain", "Ask a replica group to leave after its current step."),
    "kill": Lazy("lighthouse.cli.kill:kill", "End the replica group REPLICA_ID through its manager."),
    "runs": Lazy(
        "lighthouse.cli.runs:runs",
        "List the runs with their generation, ranks and restarts, and the groups under a supervisor.",
    ),
    "stop": Lazy("lighthouse.cli.stop:stop", "Stop a run until it is resumed."),
    "resume": Lazy("lighthouse.cli.stop:resume", "Lift the stop of a run and let excluded hosts in again."),
    "keys": Lazy(
        "lighthouse.cli.keys:keys", "List the keys that ranks set in a run's current generation, or in an earlier one."
    ),
    "doctor": Lazy(
        "lighthouse.cli.doctor.verb:doctor",
        "Check that this host can use the lighthouse: address, TLS, token, clock, versions, store, managers.",
    ),
    "debug": Lazy("lighthouse.cli.debug:debug", "Collect what helps to find a fault."),
}


@click.group(cls=LazyGroup, commands=LazyCommands(_VERBS), context_settings=CONTEXT_SETTINGS)
@click.version_option(VERSION, prog_name="lighthouse")
def main() -> None:
    """The coordinator of fault-tolerant training: it decides which replica groups train together."""
