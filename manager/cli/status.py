"""`lighthouse-manager status`: show the state of one manager."""

import dataclasses
import json

import click

from lighthouse_protocol.identity import parse_target
from lighthouse_protocol.limits import MANAGER_PORT
from lighthouse_protocol.messages.status import ManagerStatus
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.cli import Duration, format_duration, format_options, printable, reports_errors
from lighthouse_runtime.client.clients import ManagerClient
from manager.server.service import secret_from


@click.command()
@click.option(
    "--manager",
    "address",
    metavar="HOST:PORT",
    envvar=["LIGHTHOUSE_MANAGER_ADDRESS"],
    show_envvar=True,
    default=f"localhost:{MANAGER_PORT}",
    show_default=True,
    callback=lambda ctx, param, value: _address(ctx, param, value),
    help="Address of the manager.",
)
@format_options
@click.option("--timeout", type=Duration(), default="5s", show_default=True, help="Timeout of each request.")
@reports_errors
def status(address: str, output: str, timeout: float) -> None:
    """Show a manager's addresses, its step and quorum, and which ranks are waiting."""
    with ManagerClient(address, secret_from()) as client:
        answer = client.status(timeout_s=timeout)
    if output == "json":
        click.echo(json.dumps(dataclasses.asdict(answer), indent=2))
        return
    for name, value in _rows(answer):
        click.echo(f"{name:<12} {printable(value)}")


def _address(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        return str(parse_target(value, "--manager"))
    except InvalidRequest as e:
        raise click.BadParameter(str(e), ctx, param) from None


def _kept(s: ManagerStatus) -> str:
    size_mib = max(each.size_bytes for each in s.kept) / 2**20
    parts = [f"step {s.kept_step} in memory, up to {size_mib:,.1f} MiB per rank"] if s.kept_step else []
    parts += [f"rank {each.rank} keeps no newer state: {each.problem}" for each in s.kept if each.problem][:1]
    return "; ".join(parts) or "nothing yet"


def _rows(s: ManagerStatus) -> list[tuple[str, str]]:
    ranks = "1 rank" if s.group_world_size == 1 else f"{s.group_world_size} ranks"
    waiting = f", waiting: ranks {list(s.ranks_waiting)}" if s.ranks_waiting else ""
    reachable = "answers" if s.lighthouse_reachable else f"LOST: {s.lighthouse_error}"
    return [
        ("replica", f"{s.replica_id} ({ranks}), start {s.start}, job {s.job}"),
        ("serves", f"{s.address}, up {format_duration(s.uptime_s)}, version {s.version}"),
        ("store", s.store_address),
        ("lighthouse", f"{s.lighthouse} {reachable}"),
        ("step", f"{s.step} in quorum {s.quorum_id}, {s.phase}{waiting}"),
        ("quorum", f"held: {s.mode or 'unknown'}, {s.grants} steps granted without asking the lighthouse"),
        ("decisions", f"{s.commits} committed, {s.discards} discarded"),
        *([("keeps", _kept(s))] if s.kept else []),
    ]
