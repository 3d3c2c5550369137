"""`lighthouse-manager serve`: serve a replica group whose ranks are started by another program."""

import functools
import signal
import sys
from typing import Any

import click

from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.cli import from_options, options
from lighthouse_runtime.process.children import die_with_parent
from lighthouse_runtime.process.logs import set_up_logging
from lighthouse_runtime.process.loop import run_daemon
from lighthouse_runtime.process.standard_error import StandardError
from manager.server import daemon
from manager.server.config import ENV_PREFIX, ManagerConfig
from manager.server.service import secret_from


@click.command()
@options(ManagerConfig, ENV_PREFIX)
@click.option("--parent-pid", type=int, hidden=True, help="Exit when this process exits.")
@click.option("--announce-fd", type=int, hidden=True, help="Write the address to this descriptor when ready.")
def serve(parent_pid: int | None, announce_fd: int | None, **values: Any) -> None:
    """Serve a replica group whose ranks are started by another program.

    Runs until SIGTERM. The ranks find the manager through LIGHTHOUSE_MANAGER_ADDRESS. If you set
    LIGHTHOUSE_MANAGER_SECRET here and for the ranks, the manager serves only callers that send this secret. Otherwise
    it serves only callers on this host.
    """
    config = from_options(ManagerConfig, values)
    if parent_pid is not None:
        die_with_parent(parent_pid, signal.SIGTERM)
    try:
        secret = secret_from()
        set_up_logging(
            config.log_level,
            config.log_format,
            job=config.job,
            replica_group=config.replica_id,
            secrets=(secret, config.coordinator.token),
            output=StandardError(),
        )
        sys.exit(run_daemon(functools.partial(daemon.serve, config, secret, announce_fd)))
    except LighthouseError as e:
        raise click.ClickException(str(e)) from None
