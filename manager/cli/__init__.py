"""The command `lighthouse-manager`."""

import lighthouse_runtime.process.grpc_environment  # noqa: F401, I001  # pyright: ignore[reportUnusedImport]  before grpc

import click

from lighthouse_runtime.cli.lazy_commands import Lazy, LazyCommands, LazyGroup
from lighthouse_runtime.cli.settings import CONTEXT_SETTINGS
from lighthouse_protocol import VERSION

_VERBS = {
    "run": Lazy("manager.cli.run:run", "Run the ranks of a replica group, and restart them when they die."),
    "serve": Lazy("manager.cli.serve:serve", "Serve one replica group until SIGTERM."),
    "status": Lazy("manager.cli.status:status", "Show a manager: its step, its quorum, and whom it waits for."),
}


@click.group(cls=LazyGroup, commands=LazyCommands(_VERBS), context_settings=CONTEXT_SETTINGS)
@click.version_option(VERSION, prog_name="lighthouse-manager")
def main() -> None:
    """The daemon beside each replica group: it speaks for the group's ranks."""
