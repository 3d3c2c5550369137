"""The command `lighthouse`."""

import lighthouse_runtime.process.grpc_environment  # noqa: F401, I001  # pyright: ignore[reportUnusedImport]  before grpc

import click

from lighthouse.cli.drain import drain
from lighthouse.cli.incident import incident
from lighthouse.cli.incidents import incidents
from lighthouse.cli.keys import keys
from lighthouse.cli.kill import kill
from lighthouse.cli.members import members
from lighthouse.cli.ranks import ranks
from lighthouse.cli.runs import runs
from lighthouse.cli.serve import serve
from lighthouse.cli.stacks import stacks
from lighthouse.cli.status import status
from lighthouse.cli.stop import resume, stop
from lighthouse.cli.watch import watch
from lighthouse_runtime.cli.settings import CONTEXT_SETTINGS
from lighthouse_protocol import VERSION


@click.group(context_settings=CONTEXT_SETTINGS)
@click.version_option(VERSION, prog_name="lighthouse")
def main() -> None:
    """The coordinator of fault-tolerant training: it decides which replica groups train together."""


_SEEING = (status, members, ranks, watch, stacks, incidents, incident)
for command in (serve, *_SEEING, drain, kill, runs, stop, resume, keys):
    main.add_command(command)
