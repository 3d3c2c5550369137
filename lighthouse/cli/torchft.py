"""The command torchft_lighthouse: `lighthouse serve` with torchft's flags, and its page on the next port."""

from typing import Any

import click

from lighthouse.cli.serve import run
from lighthouse.server.config import ENV_PREFIX, LighthouseConfig
from lighthouse_runtime.cli.settings import CONTEXT_SETTINGS, from_options, options


@click.command(context_settings=CONTEXT_SETTINGS)
@options(LighthouseConfig, ENV_PREFIX)
@click.option("--quorum-tick-ms", hidden=True)
def main(quorum_tick_ms: str | None, **values: Any) -> None:
    """lighthouse serve under torchft's name: --bind, --min_replicas, --join_timeout_ms, --heartbeat_timeout_ms ...

    Its clients have no TLS: --insecure is implied.
    """
    values["insecure"] = True
    run(from_options(LighthouseConfig, values))
