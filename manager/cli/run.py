"""`lighthouse-manager run`: supervise the ranks of a replica group.

The guard process is started after the command line is checked and before gRPC is used, because gRPC does not survive a
fork. Host 0 of a group runs a `HeadHost`, and its other hosts run a `WorkerHost`.
"""

import functools
import os
import secrets
import signal
import sys
from typing import Any

import click
from click.core import ParameterSource

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE, SECRET_BYTES
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError
from lighthouse_protocol.rules.access import prove
from lighthouse_runtime.cli import from_options, options
from lighthouse_runtime.net.address import split_bind
from lighthouse_runtime.process.children import die_with_parent
from lighthouse_runtime.process.logs import set_up_logging
from lighthouse_runtime.process.loop import StopRequest, run_daemon
from lighthouse_runtime.process.standard_error import StandardError
from manager.guard.client import GuardClient
from manager.server.config import ENV_PREFIX, ManagerConfig
from manager.server.service import secret_from
from manager.supervisor.config import SupervisorConfig
from manager.supervisor.head_host import HeadHost
from manager.supervisor.local_host import Launch
from manager.supervisor.rules.plan import Torchrun, read_torchrun
from manager.supervisor.worker_host import WorkerHost


@click.command(context_settings={"allow_interspersed_args": False})
@options(SupervisorConfig, ENV_PREFIX)
@options(ManagerConfig, ENV_PREFIX)
@click.option("-m", "--module", is_flag=True, help="Run CMD as a Python module, as python -m does.")
@click.option("--parent-pid", type=int, hidden=True, help="Exit when this process exits.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="CMD...")
def run(module: bool, parent_pid: int | None, command: tuple[str, ...], **values: Any) -> None:
    """Run the ranks of a replica group and restart them when they die.

    Serves the group as `serve` does, and starts CMD for each rank. Exit status: 0 when all ranks are done, 130 when the
    run was stopped, 128 plus the signal number after a signal (143 after SIGTERM).
    """
    words = _command_of(command, module)
    torchrun = read_torchrun(words, os.environ)
    if torchrun is not None:
        values["master_port"] = torchrun.master_port or values["master_port"]
    config, settings = from_options(ManagerConfig, values), from_options(SupervisorConfig, values)
    _check(torchrun, settings, config)
    launch = Launch(config, settings, words, torchrun, _group_secret(config, settings))
    if parent_pid is not None:
        die_with_parent(parent_pid, signal.SIGTERM)
    own_secrets = (launch.group_secret, launch.run_secret, config.coordinator.token)
    set_up_logging(
        config.log_level,
        config.log_format,
        job=config.job,
        replica_group=config.replica_id,
        secrets=own_secrets,
        output=StandardError(),
    )
    # Start the guard before gRPC is used, because gRPC does not survive a fork.
    guard = GuardClient(observes=settings.observe == "on", is_all=True)
    try:
        sys.exit(run_daemon(functools.partial(_supervise, launch, guard)))
    except LighthouseError as e:
        raise click.ClickException(str(e)) from None
    finally:
        guard.kill_now()


async def _supervise(launch: Launch, guard: GuardClient, stop: StopRequest) -> None:
    kind = HeadHost if launch.settings.node_rank == 0 else WorkerHost
    stop(await kind(launch, guard).run())


def _command_of(command: tuple[str, ...], is_module: bool) -> tuple[str, ...]:
    """Return the command line of a rank. Like torchrun, run scripts and modules (`-m`) with this interpreter."""
    if is_module:
        return (sys.executable, "-u", "-m", *command)
    if command[0] == "-m":
        if len(command) == 1:
            raise click.UsageError("-m: the name of the module is missing")
        return (sys.executable, "-u", *command)
    return (sys.executable, "-u", *command) if command[0].endswith(".py") else command


def _check(torchrun: Torchrun | None, settings: SupervisorConfig, config: ManagerConfig) -> None:
    if torchrun is None:
        source, size = click.get_current_context().get_parameter_source("group_world_size"), settings.layout.world_size
        if source is ParameterSource.COMMANDLINE and config.group_world_size != size:
            raise click.UsageError(
                f"--group-world-size {config.group_world_size} is not --nnodes {settings.nnodes} x --nproc-per-node "
                f"{settings.nproc_per_node}; leave it out"
            )
        return
    if torchrun.max_restarts != "0":
        raise click.UsageError(
            f"torchrun --max-restarts={torchrun.max_restarts}: only one of the two may restart the ranks; give "
            "torchrun --max-restarts=0, and --max-restarts to lighthouse-manager run"
        )
    if settings.nproc_per_node != 1:
        raise click.UsageError(
            f"--nproc-per-node {settings.nproc_per_node}: torchrun starts the ranks; give torchrun --nproc-per-node"
        )
    if torchrun.world_size is None and settings.keep_every:
        raise click.UsageError(
            "--keep-every: the ranks of this host are unknown; give torchrun numbers for --nproc-per-node and --nnodes"
        )
    if torchrun.world_size is None and config.group_world_size == 1:
        raise click.UsageError("--group-world-size is missing: it cannot be derived from torchrun's options")


def _group_secret(config: ManagerConfig, settings: SupervisorConfig) -> str:
    """Return the secret that all hosts of the group share.

    It comes from the environment if it is set there. Otherwise, a group on a single host uses a random secret, and a
    group on several hosts derives it from the join token. Without a join token it is empty, which is allowed only if
    the hosts connect over loopback.
    """
    try:
        secret = secret_from()
    except InvalidRequest as e:
        raise click.UsageError(str(e)) from None
    if secret:
        return secret
    if settings.nnodes == 1:
        return secrets.token_hex(SECRET_BYTES)
    if config.coordinator.token:
        return prove(config.coordinator.token, "group", config.job, config.replica_id)
    where = split_bind(config.bind, "--bind")[0] if settings.node_rank == 0 else settings.head or ""
    if parse_address(where, "--head").is_loopback:
        return ""
    raise click.UsageError(
        f"--nnodes {settings.nnodes}: the hosts of a group authenticate with a secret, but {MANAGER_SECRET_VARIABLE} "
        "is not set. Set it to the same value on all of them, for example the output of `openssl rand -hex 32`. It is "
        "not needed if --lighthouse is a join string"
    )
