"""The `lighthouse-manager` command line.

Each command lives in a module that is imported only when the command runs, which keeps `--help` fast.
"""

import lighthouse_runtime.process.grpc_environment  # noqa: F401, I001  # pyright: ignore[reportUnusedImport]  before grpc

import click

from lighthouse_runtime.cli import CONTEXT_SETTINGS, LazyCommand, LazyGroup
from lighthouse_protocol import VERSION

_VERBS = {
    "run": LazyCommand("manager.cli.run:run", "Run the ranks of a replica group and restart them when they die."),
    "serve": LazyCommand(
        "manager.cli.serve:serve", "Serve a replica group whose ranks are started by another program."
    ),
    "status": LazyCommand(
        "manager.cli.status:status", "Show a manager's addresses, its step and quorum, and which ranks are waiting."
    ),
}


@click.group(cls=LazyGroup, verbs=_VERBS, context_settings=CONTEXT_SETTINGS)
@click.version_option(VERSION, prog_name="lighthouse-manager")
def main() -> None:
    """Manage one replica group, and talk to the lighthouse on behalf of its ranks.

    Most jobs need only `run`, which does everything that `serve` does.
    """
