"""`lighthouse debug bundle`: collect the information for a bug report in one archive.

All parts are read in parallel, each with a time limit. If a part fails, the archive contains a text file with the
reason instead. Secrets are removed from environment variables, command lines and texts.
"""

import contextlib
import dataclasses
import functools
import http.client
import io
import itertools
import json
import os
import platform
import re
import socket
import ssl
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from lighthouse.cli.doctor import facts_of, finding_line
from lighthouse.cli.incidents import incident_lines
from lighthouse.cli.listings import run_lines
from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options
from lighthouse.cli.rules import Level, check
from lighthouse.cli.tables import status_lines
from lighthouse.store.sqlite import default_path, journal_summary
from lighthouse_protocol import VERSION
from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.limits import LIGHTHOUSE_HTTP_PORT, TOKEN_SCHEME
from lighthouse_protocol.messages.incident import IncidentSummary, to_document
from lighthouse_protocol.refusals import DeadlinePassed, InvalidRequest, LighthouseError, NotServed
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.process.children import command_lines
from lighthouse_runtime.process.commands import installed_versions
from lighthouse_runtime.process.logs import REMOVED, without_credentials
from lighthouse_runtime.security.client_tls import ClientTls, fetch_tls, load_key_pair
from lighthouse_runtime.security.serving import with_local_credentials
from lighthouse_runtime.timing.pacing import BackgroundRead

INCIDENTS_KEPT = 20
MAX_PART_BYTES = 64 * 2**20
_SLACK_S = 1.0
_CONFIG = re.compile(r"(LIGHTHOUSE|TORCHFT)_\w+|REPLICA_GROUP_ID|NUM_REPLICA_GROUPS|GRPC_\w+")
# The URL of a webhook (--on-preemption) is a secret, too: whoever knows it can post to it.
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|PRIVATE|KEY|ON.PREEMPTION", re.IGNORECASE)
_DAEMONS = {("lighthouse", "serve"), ("lighthouse-manager", "serve")}


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the bundle. `read` returns its content, and may raise or hang."""

    name: str
    read: Callable[[], bytes]


@click.group()
def debug() -> None:
    """Collect logs and status for a bug report."""


@debug.command()
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.  [default: lighthouse-debug-TIME.tar.gz]",
)
@click.option(
    "--http",
    "http_side",
    metavar="HOST:PORT",
    help=f"HTTP address of the lighthouse.  [default: its host; the port that it reports, else {LIGHTHOUSE_HTTP_PORT}]",
)
@click.option(
    "--journal",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Journal of the lighthouse, if it is on this host.  [default: the one for the lighthouse's port]",
)
@client_options(job_help=EVERY_JOB, timeout="10s")
def bundle(given: ClientOptions, out: Path | None, http_side: str | None, journal: Path | None) -> None:
    """Write a summary, status, incidents, log, metrics, journal, checks and versions to one file.

    If a part fails or takes longer than --timeout, a text file in its place gives the reason. Join strings, tokens and
    the values of variables whose names suggest a secret are removed. Read the file before you share it: it contains
    output and stacks of ranks.
    """
    path = out or Path(time.strftime("lighthouse-debug-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    leader = functools.cache(lambda: _leader(given))
    parts = [
        Part("summary.txt", lambda: _summary(given)),
        Part("about.json", lambda: _json(_about(given.address))),
        Part("config.json", lambda: _json(_config())),
        Part("doctor.txt", lambda: _text(_doctor(given))),
        Part("status.json", lambda: _json(given.status(ranks=True))),
        Part("runs.json", lambda: _json(_runs(given))),
        Part("incidents.json", lambda: _json(_incidents(given))),
        *(Part(f"http/{name}", lambda name=name: _get(given, leader(), http_side, name)) for name in _PAGES),
        Part("journal.json", lambda: _json(journal_summary(journal or _journal_of(given.coordinator)))),
    ]
    failed = write_bundle(path, parts, given.timeout + _SLACK_S)
    missing = f"; missing: {', '.join(failed)} (NAME.error.txt says why)" if failed else ""
    click.echo(f"wrote {path}: {len(parts)} parts{missing}")


_PAGES = ("livez", "readyz", "metrics", "log")
_WIDTH = 120  # columns of the summary


def write_bundle(path: Path, parts: Iterable[Part], limit_s: float) -> list[str]:
    """Read all parts in parallel and write them to an archive. Leave no partial file after an error or Ctrl-C.

    Args:
        path: The archive to create. A regular file of this name is replaced.
        parts: Files of the archive. If one cannot be read, NAME.error.txt gives the reason.
        limit_s: Time limit in seconds for each part.

    Returns:
        The names of the parts that could not be read.

    Raises:
        InvalidRequest: If the archive cannot be written, or `path` is a device or a pipe.
    """
    reading = [(part, BackgroundRead(part.name, part.read, limit_s)) for part in parts]
    failed: list[str] = []
    temporary: Path | None = None
    try:
        if path.exists() and not path.is_file():  # replacing /dev/null would harm the whole host
            raise InvalidRequest(f"{path} is not a regular file; name another file", field="--out")
        path = path.resolve()  # to write the target of a link, instead of replacing the link
        with (
            tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file,
            tarfile.open(fileobj=file, mode="w:gz") as tar,
        ):
            temporary = Path(file.name)
            for part, answer in reading:
                name, body = part.name, _outcome(answer)
                if isinstance(body, str):
                    failed.append(name)
                    name, body = f"{name}.error.txt", (body + "\n").encode()
                entry = tarfile.TarInfo(f"lighthouse-debug/{name}")
                entry.size, entry.mtime, entry.mode = len(body), int(time.time()), 0o600
                tar.addfile(entry, io.BytesIO(body))
        temporary.replace(path)
    except OSError as e:
        raise InvalidRequest(f"cannot write {path}: {e.strerror or e}; name another file", field="--out") from e
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # the file still exists after an error or Ctrl-C
    return failed


def _outcome(answer: BackgroundRead[bytes]) -> bytes | str:
    """Return a part's content (bytes), or the reason (str) if it could not be read."""
    try:
        return answer.result()
    except DeadlinePassed as e:
        return str(e)
    except Exception as e:  # noqa: BLE001  any error belongs in the bundle
        return f"{type(e).__name__}: {e}"


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=2, default=dataclasses.asdict).encode()


def _text(lines: Iterable[Text]) -> bytes:
    return "".join(f"{line.plain}\n" for line in lines).encode()


def _summary(given: ClientOptions) -> bytes:
    """Return the output of `status`, `runs` and `incidents`, and the failed checks and warnings of `doctor`."""
    sections: list[bytes] = []
    for title, lines in (
        ("status", lambda: status_lines(given.status(), _WIDTH)),
        ("runs", lambda: [line for run in _runs(given) for line in run_lines(run, _WIDTH)]),
        ("incidents", lambda: incident_lines(_summaries(given)[:INCIDENTS_KEPT], _WIDTH)),
        ("doctor", lambda: _doctor(given, Level.WARN, Level.FAIL)),
    ):
        try:
            text = _text(lines())
        except LighthouseError as e:
            text = f"{e}\n".encode()
        sections.append(f"== {title}\n".encode() + text)
    return b"\n".join(sections)


def _doctor(given: ClientOptions, *levels: Level) -> list[Text]:
    findings = check(facts_of(given))
    return [finding_line(finding) for finding in findings if finding.level in (levels or Level)]


def _about(address: str) -> dict[str, Any]:
    return {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "lighthouse": address,
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": sys.version,
        "cli": VERSION,
        "packages": installed_versions(),
    }


def _config() -> dict[str, Any]:
    """Return Lighthouse's environment variables and the command lines of daemons on this host, without secrets."""
    environment = {name: without_secrets(name, value) for name, value in os.environ.items() if _CONFIG.fullmatch(name)}
    daemons = [shown_words(line) for line in command_lines() if is_daemon(line)]
    return {"environment": environment, "daemons": daemons}


def is_daemon(line: Sequence[str]) -> bool:
    """Return whether a command line starts a daemon.

    Supervisors do not count, because their command lines contain the user's own command, which may contain secrets.
    """
    words = [os.path.basename(word) for word in line[:8]]
    return any(pair in _DAEMONS for pair in itertools.pairwise(words))


def without_secrets(name: str, value: str) -> str:
    """Return the value of the variable or option `name` without secrets. Paths of secret files are kept."""
    if _SECRET.search(name) and not name.lower().endswith("file"):
        return REMOVED
    return without_credentials(value)


def shown_words(line: Sequence[str]) -> list[str]:
    """Return the words of a command line without the secrets in its options."""
    shown: list[str] = []
    for before, word in itertools.pairwise(["", *line]):
        option, equals, value = word.partition("=")
        if equals and option.startswith("--"):
            shown.append(f"{option}={without_secrets(option, value)}")
        else:
            shown.append(without_secrets(before if before.startswith("--") and "=" not in before else "", word))
    return shown


def _runs(given: ClientOptions) -> Any:
    with given.connect() as client:
        return client.runs(timeout_s=given.timeout)


def _summaries(given: ClientOptions) -> Sequence[IncidentSummary]:
    with given.connect() as client:
        return client.incidents(given.job, timeout_s=given.timeout)


def _incidents(given: ClientOptions) -> list[Any]:
    """Return the most recent incidents with their evidence. If a request fails, return the summary and the error."""
    with given.connect() as client:
        found: list[Any] = []
        for summary in _summaries(given)[:INCIDENTS_KEPT]:
            try:
                found.append(to_document(client.incident(summary.id, timeout_s=given.timeout)))
            except Exception as e:  # noqa: BLE001  one refused incident must not hide the others
                found.append({"summary": summary, "error": str(e)})
        return found


def _get(given: ClientOptions, leader: tuple[Address, int], http_side: str | None, name: str) -> bytes:
    """Fetch /NAME from the lighthouse's HTTP port, over HTTPS if its gRPC port uses TLS.

    `leader` is the result of `_leader`. `http_side` is the value of --http, which replaces the HTTP address.
    Redirects are not followed, because another server must not receive the token.
    """
    grpc_address, port = leader
    coordinator = with_local_credentials(given.coordinator.at(grpc_address), Role.OPERATE)
    headers = {"Authorization": TOKEN_SCHEME + coordinator.token} if coordinator.token else {}
    where = Address(grpc_address.host, port) if http_side is None else parse_address(http_side, "--http")
    where = Address(where.host, where.port or LIGHTHOUSE_HTTP_PORT)
    if coordinator.has_tls:
        context = _tls(fetch_tls(coordinator, given.timeout), coordinator)
        connection = http.client.HTTPSConnection(where.host, where.port, timeout=given.timeout, context=context)
    else:
        connection = http.client.HTTPConnection(where.host, where.port, timeout=given.timeout)
    with contextlib.closing(connection):
        connection.request("GET", f"/{name}", headers=headers)
        answer = connection.getresponse()
        body = answer.read(MAX_PART_BYTES + 1)
    if answer.status != 200:
        raise NotServed(f"{where} answers /{name} with {answer.status}: {body[:500].decode(errors='replace').strip()}")
    if len(body) > MAX_PART_BYTES:
        raise InvalidRequest(f"/{name} is larger than {MAX_PART_BYTES} bytes")
    return body


def _tls(tls: ClientTls, coordinator: Coordinator) -> ssl.SSLContext:
    """Return the TLS settings for HTTPS, with the CA and certificates that gRPC uses.

    The host name is not checked if the lighthouse has its own CA, which signs no other server's certificate.
    """
    context = ssl.create_default_context(cadata=tls.roots.decode())
    context.check_hostname = not tls.name
    if coordinator.files.cert:
        load_key_pair(context, coordinator.files.cert, coordinator.files.key)
    return context


def _leader(given: ClientOptions) -> tuple[Address, int]:
    """Return the gRPC address and the HTTP port of the leading lighthouse. The HTTP port is 0 if it is unknown.

    If no lighthouse answers, return the first address in `given` and 0.
    """
    with given.connect() as client:
        try:
            port = client.status(timeout_s=given.timeout).http_port
            return parse_address(client.address, "--lighthouse"), port
        except LighthouseError:
            return given.coordinator.addresses[0], 0


def _journal_of(coordinator: Coordinator) -> Path:
    """Return the path of a lighthouse's journal on this host.

    Tries LIGHTHOUSE_JOURNAL, this user's default, and the path in the container image and the systemd unit.

    Raises:
        InvalidRequest: If none of these files exists.
    """
    port = coordinator.addresses[0].port
    path = default_path().with_name(f"journal-{port}.sqlite")
    known = (os.environ.get("LIGHTHOUSE_JOURNAL", ""), str(path), "/var/lib/lighthouse/journal.sqlite")
    found = next((each for each in known if each and each != "none" and os.path.exists(each)), None)
    if found is None:
        raise InvalidRequest(f"no journal on this host: neither {path} nor one that --journal names")
    return Path(found)
