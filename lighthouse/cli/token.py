"""`lighthouse token`: print a join string of a lighthouse on this host, or rotate one of its tokens."""

import getpass
from pathlib import Path

import click

from lighthouse.server.config import ENV_PREFIX
from lighthouse_protocol.coordinator import parse_coordinator
from lighthouse_protocol.limits import LIGHTHOUSE_PORT
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules.access import Principal, Role
from lighthouse_runtime.cli import reports_errors
from lighthouse_runtime.net.address import own_name
from lighthouse_runtime.process.files import state_folder
from lighthouse_runtime.security.access import Audit
from lighthouse_runtime.security.credentials import FILE, ROLES, Tokens, load_or_make, read_pin, token_name
from lighthouse_runtime.security.serving import Serving, read_serving_file, served_ports

_ROLES = [role.value for role in ROLES]
_ROTATE = "rotate"
PORTS_NAMED = 8


@click.command()
@click.argument("what", type=click.Choice([*_ROLES, _ROTATE]), default=Role.JOIN.value)
@click.argument("role", type=click.Choice(_ROLES), required=False)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=LIGHTHOUSE_PORT,
    show_default=True,
    help="gRPC port of the lighthouse.",
)
@click.option(
    "--host",
    metavar="HOST[,HOST...]",
    help="Host name to put into the string; several, if several lighthouses share these credentials.  [default: this "
    "host's name]",
)
@click.option(
    "--credentials",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    envvar=f"{ENV_PREFIX}_CREDENTIALS",
    show_envvar=True,
    help="Credentials folder of the lighthouse.  [default: the one of the lighthouse on --port]",
)
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    envvar=f"{ENV_PREFIX}_JOURNAL",
    show_envvar=True,
    help="Journal of the lighthouse, if it has --journal: the credentials are in the same folder.",
)
@click.option("--make", is_flag=True, help="Create missing credentials, for a lighthouse that starts later.")
@reports_errors
def token(
    what: str, role: str | None, port: int, host: str | None, folder: Path | None, journal: Path | None, make: bool
) -> None:
    """Print the join string of a role, or rotate its token.

    Training hosts, operators and viewers set LIGHTHOUSE_ADDRESS to the join string of their role. Treat it as a
    password. `rotate ROLE` creates a new token; the previous one stays valid until the next rotation, and open sessions
    stay open.
    """
    serving = _serving(port, folder, journal, make=make)
    tokens = Tokens.read(serving.credentials)
    if what == _ROTATE:
        chosen = Role(role or Role.JOIN)
        tokens = tokens.rotated(chosen)
        try:
            tokens.write(serving.credentials)
        except OSError as e:
            raise InvalidRequest(
                f"cannot write to {serving.credentials}: {e.strerror}; no token has changed", field="--credentials"
            ) from e
        new = token_name(chosen, tokens.newest(chosen))
        me = Principal(f"user {_user()}", frozenset({Role.OPERATE}))
        Audit(serving.credentials.parent / "audit.jsonl").act(me, "this host", "rotate", f"role={chosen}", f"now {new}")
    elif role is not None:
        raise click.UsageError(f"{what} takes no second argument; write `lighthouse token {what}`")
    else:
        chosen = Role(what)
    where = parse_coordinator(host or own_name(), "--host", port).addresses
    click.echo(serving.coordinator(where, tokens.newest(chosen)).join_string())


def _serving(port: int, folder: Path | None, journal: Path | None, *, make: bool) -> Serving:
    """Find the credentials of the lighthouse on `port` of this host.

    Args:
        port: gRPC port of the lighthouse.
        folder: Value of --credentials, or None.
        journal: Value of --journal, next to which the credentials may be, or None.
        make: Whether to create the credentials if there are none.

    Raises:
        InvalidRequest: If there are no credentials and `make` is False.
    """
    found = read_serving_file(port)
    if folder is None and journal is None and found is not None:
        return found
    if folder is None:
        has_journal = journal is not None and str(journal) != "none"
        beside = journal.parent if journal is not None and has_journal else state_folder("--credentials")
        folder = beside / f"credentials-{port}"
    if make:
        load_or_make(folder, ("localhost", "127.0.0.1", "::1", own_name()))
    elif not _has_tokens(folder):
        raise InvalidRequest(
            f"no credentials in {folder}: this user has not run a lighthouse for other hosts on port {port}; "
            f"{_other_ports_hint()}start it (lighthouse serve), run this as its user, set --credentials, or use --make",
            field="--credentials",
        )
    if found is not None and found.credentials == folder:
        return found
    if not (folder / "ca.pem").exists():  # a lighthouse with --tls-cert creates such a folder
        return Serving("", folder, has_own_pki=True)
    return Serving(read_pin(folder), folder)


def _has_tokens(folder: Path) -> bool:
    try:
        return (folder / FILE).exists()
    except OSError as e:
        raise InvalidRequest(
            f"cannot read {folder}: {e.strerror}; run this as the user of the lighthouse", field="--credentials"
        ) from e


def _other_ports_hint() -> str:
    """Return a hint that names the ports of this user's other lighthouses, or an empty string."""
    ports = served_ports()
    if not ports:
        return ""
    return f"there is one on {', '.join(map(str, ports[:PORTS_NAMED]))}: set --port, or "


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
