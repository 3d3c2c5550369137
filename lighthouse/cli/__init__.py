"""The `lighthouse` command line.

Each command lives in a module that is imported only when the command runs, so that `--help` stays fast.
"""

import lighthouse_runtime.process.grpc_environment  # noqa: F401, I001  # pyright: ignore[reportUnusedImport]  before grpc

import click

from lighthouse_runtime.cli import CONTEXT_SETTINGS, LazyCommand, LazyGroup
from lighthouse_protocol import VERSION

_INSPECT, _CONTROL, _ACCESS = "Inspect", "Control", "Access and support"
_VERBS = {
    "serve": LazyCommand("lighthouse.cli.serve:serve", "Run the lighthouse on a coordinator host until SIGTERM."),
    "status": LazyCommand("lighthouse.cli.status:status", "Show whether each job is making progress, and if not, why."),
    "watch": LazyCommand("lighthouse.cli.status:watch", "Show the status and refresh it until Ctrl-C."),
    "incidents": LazyCommand("lighthouse.cli.incidents:incidents", "List incidents, newest first."),
    "report": LazyCommand(
        "lighthouse.cli.report:report",
        "Show what failures cost: hours by cause, host and group, and times to failure and recovery.",
    ),
    "doctor": LazyCommand("lighthouse.cli.doctor:doctor", "Check that this host can use the lighthouse."),
    "members": LazyCommand("lighthouse.cli.listings:members", "List the replica groups.", _INSPECT),
    "ranks": LazyCommand(
        "lighthouse.cli.listings:ranks", "List what every rank is doing, ranks that are behind first.", _INSPECT
    ),
    "runs": LazyCommand(
        "lighthouse.cli.listings:runs", "List the runs, their supervised groups and restarts.", _INSPECT
    ),
    "incident": LazyCommand(
        "lighthouse.cli.incidents:incident", "Show an incident: its timeline and what each rank was doing.", _INSPECT
    ),
    "stacks": LazyCommand("lighthouse.cli.listings:stacks", "Show the current Python stacks of all ranks.", _INSPECT),
    "keys": LazyCommand("lighthouse.cli.listings:keys", "List the keys that the ranks of a run have set.", _INSPECT),
    "drain": LazyCommand(
        "lighthouse.cli.control:drain", "Ask a replica group to leave after its current step.", _CONTROL
    ),
    "kill": LazyCommand("lighthouse.cli.control:kill", "Kill a replica group through its manager.", _CONTROL),
    "stop": LazyCommand("lighthouse.cli.control:stop", "Stop a run until it is resumed.", _CONTROL),
    "chaos": LazyCommand(
        "lighthouse.cli.chaos:chaos",
        "Inject faults into a running job, and check that its training survives them.",
        _CONTROL,
    ),
    "resume": LazyCommand("lighthouse.cli.control:resume", "Undo `stop` and re-admit excluded hosts.", _CONTROL),
    "token": LazyCommand(
        "lighthouse.cli.token:token", "Print the join string of a role, or rotate its token.", _ACCESS
    ),
    "check-history": LazyCommand(
        "lighthouse.cli.check_history:check_history", "Check a job's logs against what Lighthouse promises.", _ACCESS
    ),
    "debug": LazyCommand("lighthouse.cli.debug:debug", "Collect logs and status for a bug report.", _ACCESS),
}


@click.group(cls=LazyGroup, verbs=_VERBS, context_settings=CONTEXT_SETTINGS)
@click.version_option(VERSION, prog_name="lighthouse")
def main() -> None:
    """Coordinate fault-tolerant PyTorch training.

    The lighthouse decides which replica groups train together.
    """
