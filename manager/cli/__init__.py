"""The command `lighthouse-manager`."""

import lighthouse_runtime.process.grpc_environment  # noqa: F401, I001  # pyright: ignore[reportUnusedImport]  before grpc

import click

from lighthouse_runtime.cli.settings import CONTEXT_SETTINGS
from manager.cli.run import run
from manager.cli.serve import serve
from manager.cli.status import status
from lighthouse_protocol import VERSION


@click.group(context_settings=CONTEXT_SETTINGS)
@click.version_option(VERSION, prog_name="lighthouse-manager")
def main() -> None:
    """The daemon beside each replica group: it speaks for the group's ranks."""


for command in (run, serve, status):
    main.add_command(command)
