"""`lighthouse serve`, and `torchft_lighthouse`, which accepts torchft's options."""

import functools
import sys
from typing import Any

import click

from lighthouse.server.config import ENV_PREFIX, LighthouseConfig
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.cli import CONTEXT_SETTINGS, from_options, options
from lighthouse_runtime.process.children import die_with_parent
from lighthouse_runtime.process.logs import set_up_logging
from lighthouse_runtime.process.loop import run_daemon
from lighthouse_runtime.process.standard_error import StandardError


def run(config: LighthouseConfig, announce: int | None = None) -> None:
    """Run the lighthouse until a stop signal, then exit with the daemon's exit status.

    `announce` is a file descriptor to which to write the gRPC port, or None.
    """
    from lighthouse.server import daemon  # half a second of imports that other verbs do not need

    set_up_logging(config.log_level, config.log_format, output=StandardError())
    try:
        sys.exit(run_daemon(functools.partial(daemon.serve, config, announce)))
    except LighthouseError as e:
        raise click.ClickException(str(e)) from None


@click.command()
@options(LighthouseConfig, ENV_PREFIX)
@click.option("--quorum-tick-ms", hidden=True, help="torchft's; a quorum forms at once here, without ticks.")
@click.option("--parent-pid", type=int, hidden=True, help="Exit when this process exits.")
@click.option("--announce-fd", type=int, hidden=True, help="Write the gRPC port to this descriptor when ready.")
def serve(quorum_tick_ms: str | None, parent_pid: int | None, announce_fd: int | None, **values: Any) -> None:
    """Run the lighthouse on a coordinator host until SIGTERM.

    Durations take a unit: 500ms, 5s, 2m. torchft's spellings (--join_timeout_ms 60000) also work.
    """
    config = from_options(LighthouseConfig, values)
    if parent_pid is not None:
        die_with_parent(parent_pid)
    run(config, announce_fd)


@click.command(context_settings=CONTEXT_SETTINGS)
@options(LighthouseConfig, ENV_PREFIX)
@click.option("--quorum-tick-ms", hidden=True)
def main(quorum_tick_ms: str | None, **values: Any) -> None:
    """Run `lighthouse serve` under its torchft name: --bind, --min_replicas, --join_timeout_ms, --heartbeat_timeout_ms.

    torchft's clients do not support TLS, so --insecure is implied.
    """
    values["insecure"] = True
    run(from_options(LighthouseConfig, values))
