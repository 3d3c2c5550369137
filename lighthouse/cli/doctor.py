"""`lighthouse doctor`: check that this host can use the lighthouse.

`gather` collects facts about the addresses, the certificate, the status and the managers, each within a time limit.
rules.py derives findings from them.
"""

import dataclasses
import os
import platform
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click
from rich.text import Text

from lighthouse.cli.options import ClientOptions, client_options
from lighthouse.cli.rules import (
    Asked,
    Certificate,
    Credential,
    Facts,
    Finding,
    Level,
    ManagerSeen,
    Place,
    Trust,
    check,
    is_healthy,
)
from lighthouse_protocol import VERSION
from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from lighthouse_protocol.messages.status import LighthouseStatus, MemberState
from lighthouse_protocol.refusals import LighthouseError, NotPermitted, NotServed, Unreachable
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.cli import printable
from lighthouse_runtime.client.clients import ManagerClient
from lighthouse_runtime.process.commands import OLDEST_TORCH, installed_versions
from lighthouse_runtime.security import certificates
from lighthouse_runtime.security.client_tls import connected, shown_certificates
from lighthouse_runtime.security.credentials import ROLES
from lighthouse_runtime.security.serving import with_local_credentials
from lighthouse_runtime.timing.pacing import BackgroundRead

AT_ONCE = 64  # managers that are queried in parallel
_SLACK_S = 1.0

T = TypeVar("T")
AskStatus = Callable[[], LighthouseStatus]


def facts_of(given: ClientOptions) -> Facts:
    """Collect facts about the lighthouse and the managers of the job, or of all jobs without --job.

    The job may be unknown to the lighthouse, because hosts are checked before the job starts.
    """

    def ask() -> LighthouseStatus:
        status = replace(given, job="").status()
        return replace(status, jobs=tuple(job for job in status.jobs if given.job in ("", job.job)))

    return gather(given.coordinator, ask, given.timeout)


def gather(given: Coordinator, ask: AskStatus, timeout_s: float) -> Facts:
    """Collect facts about a lighthouse and its managers. Managers are queried in batches of AT_ONCE.

    Args:
        given: How to connect to the lighthouse.
        ask: Requests the status. May raise a LighthouseError.
        timeout_s: Time limit for each step in seconds.
    """
    coordinator = with_local_credentials(given, Role.OPERATE)
    limit_s = timeout_s + _SLACK_S
    connecting = [BackgroundRead("address", lambda a=a: _place(a, timeout_s), limit_s) for a in coordinator.addresses]
    places = tuple(
        _result(reading, lambda e, a=a: Place(str(a), error=e))
        for reading, a in zip(connecting, coordinator.addresses, strict=True)
    )
    open_addresses = [a for a, place in zip(coordinator.addresses, places, strict=True) if not place.error]
    certificate, asked = None, None
    if open_addresses:
        showing = BackgroundRead(
            "certificate", lambda: _shown_certificate(open_addresses[0], coordinator, timeout_s), limit_s
        )
        asked = _ask(str(coordinator), ask, limit_s)
        certificate = _result(showing, lambda e: Certificate("the lighthouse's certificate", error=e))
    status = None if asked is None else asked.status
    return Facts(
        now=time.time(),
        places=places,
        trust=Trust.PIN if coordinator.ca_pin else Trust.CA if coordinator.has_tls else Trust.NONE,
        certificate=certificate,
        credential=_credential(coordinator),
        asked=asked,
        version=VERSION,
        packages={"python": platform.python_version(), **installed_versions()},
        managers=() if status is None else _managers(status, timeout_s),
        oldest_torch=OLDEST_TORCH,
    )


def _place(address: Address, timeout_s: float) -> Place:
    """Connect to `address` and return the IP address that was reached. Raise Unreachable if the connection fails."""
    with connected(address, timeout_s) as connection:
        try:
            return Place(str(address), str(connection.getpeername()[0]))
        except OSError:  # as from a proxy whose server is down
            raise Unreachable(f"{address} is unreachable: it resets connections; is it running there?") from None


def _result(reading: BackgroundRead[T], failed: Callable[[str], T]) -> T:
    """Return the result of `reading`, or `failed(message)` if it raised a LighthouseError with that message."""
    try:
        return reading.result()
    except LighthouseError as e:
        return failed(str(e))


def _ask(address: str, ask: AskStatus, limit_s: float) -> Asked:
    began_at = time.time()
    try:
        status, refusal = BackgroundRead("status", ask, limit_s).result(), None
    except LighthouseError as e:
        status, refusal = None, e
    return Asked(address, began_at, time.time(), status, refusal)


def _shown_certificate(address: Address, coordinator: Coordinator, timeout_s: float) -> Certificate | None:
    """Return the lighthouse's certificate, or None if there is no TLS or the handshake fails.

    The reason for a failed handshake is in the error from the status request, which fails as well.
    """
    if not coordinator.has_tls:
        return None
    try:
        shown = shown_certificates(address, timeout_s)
    except LighthouseError:
        return None
    return _certificate("the lighthouse's certificate", ssl.DER_cert_to_PEM_cert(shown[0]).encode()) if shown else None


def _certificate(of: str, pem: bytes) -> Certificate:
    try:
        return Certificate(of, certificates.expires_at(pem).timestamp())
    except ValueError as e:
        return Certificate(of, error=str(e))


def _credential(coordinator: Coordinator) -> Credential:
    token, path = coordinator.token, coordinator.files.cert
    role = next((role for role, start in ROLES.items() if token.startswith(start)), None)
    if not path:
        return Credential(bool(token), role)
    of = f"this host's certificate {path}"
    try:
        certificate = _certificate(of, Path(path).read_bytes())
    except OSError as e:
        certificate = Certificate(of, error=e.strerror or str(e))
    return Credential(bool(token), role, certificate)


def _managers(status: LighthouseStatus, timeout_s: float) -> tuple[ManagerSeen, ...]:
    named = [
        ManagerSeen(job.job, member.replica_id, member.address)
        for job in status.jobs
        for member in job.members
        if member.address and member.state is not MemberState.EXPIRED
    ]
    secret, limit_s = os.environ.get(MANAGER_SECRET_VARIABLE, ""), timeout_s + _SLACK_S
    seen: list[ManagerSeen] = []
    for start in range(0, len(named), AT_ONCE):
        asking = [
            (one, BackgroundRead(one.replica_id, lambda one=one: _ask_manager(one, secret, timeout_s), limit_s))
            for one in named[start : start + AT_ONCE]
        ]
        seen += [_result(reading, lambda e, one=one: replace(one, error=e)) for one, reading in asking]
    return tuple(seen)


def _ask_manager(manager: ManagerSeen, secret: str, timeout_s: float) -> ManagerSeen:
    """Request a manager's status. Return `manager`, with the error if the manager cannot reach the lighthouse.

    A manager that does not serve its status, such as torchft's, is returned unchanged.

    Raises:
        LighthouseError: If this host cannot reach the manager.
    """
    try:
        with ManagerClient(manager.address, secret) as client:
            told = client.status(timeout_s=timeout_s)
    # reachable, but it does not serve the status; torchft's managers have no such call
    except (NotPermitted, NotServed):
        return manager
    return (
        manager if told.lighthouse_reachable else replace(manager, lighthouse_error=told.lighthouse_error or "unknown")
    )


_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@click.command()
@client_options(job_help="Check only the managers of this job.  [default: all jobs]")
@click.pass_context
def doctor(ctx: click.Context, given: ClientOptions) -> None:
    """Check that this host can use the lighthouse.

    Checks address, TLS, token, clock, versions, store and managers: one line each, with the remedy if something is
    wrong. Exits with status 1 if a check fails. Each check takes at most --timeout.
    """
    findings = check(facts_of(given))
    document = {"is_healthy": is_healthy(findings), "findings": list(map(dataclasses.asdict, findings))}
    given.show(document, lambda width: list(map(finding_line, findings)))
    ctx.exit(0 if is_healthy(findings) else 1)


def finding_line(finding: Finding) -> Text:
    style = _STYLES[finding.level]
    return Text.assemble((f"{finding.level:<4}", style), f"  {finding.check:<10}  {printable(finding.text)}")
