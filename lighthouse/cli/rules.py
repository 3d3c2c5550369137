"""Rules of `lighthouse doctor`, which derive findings from facts, without I/O.

- A problem that prevents this host from using the lighthouse is a failure. A problem that may do so later, or that is
  merely suspicious, is a warning.
- A finding that is not OK contains the remedy.
- A fact that could not be collected because of an earlier failure produces no finding.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.status import LighthouseStatus, MemberState, StoreKind, StoreStatus
from lighthouse_protocol.refusals import LighthouseError, NotPermitted, Untrusted
from lighthouse_protocol.rules.access import Role

# -- facts about a lighthouse, as seen from this host; times are Unix seconds of this host's clock


class Trust(StrEnum):
    """Method by which this host verifies the lighthouse's certificate."""

    NONE = "none"  # no TLS
    PIN = "pin"  # the CA's fingerprint, in a join string
    CA = "ca"  # a file with the CAs of the user's own PKI


@dataclass(frozen=True, slots=True)
class Place:
    """Result of connecting to one of the lighthouse's addresses."""

    address: str
    ip: str = ""  # IP address of the TCP connection, or empty
    error: str = ""  # why there is no connection, or empty


@dataclass(frozen=True, slots=True)
class Certificate:
    """Expiry date of a certificate, or the reason why it cannot be read."""

    of: str  # which certificate this is, for messages
    expires_at: float | None = None  # None if the certificate cannot be read
    error: str = ""


@dataclass(frozen=True, slots=True)
class Credential:
    """Credentials that this host has for the lighthouse."""

    has_token: bool = False
    role: Role | None = None  # role of the token by its prefix, or None
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """Result of the status request: the status or an error."""

    address: str
    began_at: float
    ended_at: float
    status: LighthouseStatus | None = None
    refusal: LighthouseError | None = None


@dataclass(frozen=True, slots=True)
class ManagerSeen:
    """Result of connecting to a manager from this host."""

    job: str
    replica_id: str
    address: str
    error: str = ""  # why this host does not reach the manager, or empty
    lighthouse_error: str | None = None  # why the manager does not reach the lighthouse, as it reports; None if it does


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that `gather` in doctor.py has collected about a lighthouse and its managers."""

    now: float
    places: tuple[Place, ...]
    trust: Trust
    certificate: Certificate | None
    credential: Credential
    asked: Asked | None
    version: str
    packages: Mapping[str, str]
    managers: tuple[ManagerSeen, ...] = ()  # managers that are alive and have an address
    oldest_torch: str = ""


DAY_S = 86400.0
EXPIRES_SOON_S = 14 * DAY_S  # a lighthouse renews its own certificate 30 days before it expires
CLOCKS_DIFFER_S = 1.0
NAMED = 16  # managers with a separate line; the others are counted
# The check to which a refusal belongs; all others belong to "lighthouse".
_CHECKS: Mapping[type[object], str] = {NotPermitted: "token", Untrusted: "tls"}


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str  # subject of the check, in one word
    level: Level
    text: str  # the result, and what to do if it is not OK


def check(facts: Facts) -> list[Finding]:
    """Derive all findings from the facts, ordered so that an earlier finding may explain a later one."""
    status = None if facts.asked is None else facts.asked.status
    findings = [_place(place, is_served=status is not None) for place in facts.places]
    if facts.asked is not None:
        findings.append(_answer(facts.asked))
    findings += [*_tls(facts), *_token(facts)]
    if facts.asked is not None and status is not None:
        findings.append(_clock(facts.asked, status))
    findings.append(_versions(facts))
    if status is not None:
        findings += [_store(status.store), *_sessions(status), *_managers(facts.managers)]
    return findings


def is_healthy(findings: list[Finding]) -> bool:
    return all(finding.level is not Level.FAIL for finding in findings)


def _place(place: Place, *, is_served: bool) -> Finding:
    if not place.error:
        return Finding("address", Level.OK, f"{place.address} accepts connections at {place.ip}")
    if is_served:
        return Finding("address", Level.WARN, f"{place.error}; another lighthouse answers meanwhile")
    return Finding("address", Level.FAIL, place.error)


def _answer(asked: Asked) -> Finding:
    status = asked.status
    if status is None:
        return Finding(_CHECKS.get(type(asked.refusal), "lighthouse"), Level.FAIL, str(asked.refusal))
    took_ms = (asked.ended_at - asked.began_at) * 1000
    return Finding(
        "lighthouse", Level.OK, f"version {status.version} at {asked.address} answers after {took_ms:.0f} ms, and leads"
    )


def _tls(facts: Facts) -> Iterator[Finding]:
    status = None if facts.asked is None else facts.asked.status
    if facts.trust is Trust.NONE:
        if status is not None and status.insecure:
            yield Finding(
                "tls",
                Level.WARN,
                "other hosts reach this lighthouse without TLS, so anyone can join and read: start it without "
                "--insecure, and use the join string that `lighthouse token` prints",
            )
        elif status is not None:
            yield Finding("tls", Level.OK, "not needed: the lighthouse listens on a loopback address")
        return
    if facts.certificate is not None:
        remedy = "the lighthouse should have renewed it: see its log for the reason, or restart it"
        if facts.trust is Trust.CA:
            remedy = "renew its --tls-cert"
        yield _certificate("tls", facts.certificate, facts.now, remedy)
    if status is not None:
        by = "the pin of the join string" if facts.trust is Trust.PIN else "the CA in --tls-ca"
        yield Finding("tls", Level.OK, f"the lighthouse's certificate is trusted by {by}")


def _certificate(name: str, certificate: Certificate, now: float, remedy: str) -> Finding:
    if certificate.expires_at is None:
        return Finding(name, Level.FAIL, f"{certificate.of} cannot be read: {certificate.error}")
    left_s = certificate.expires_at - now
    if left_s <= 0:
        return Finding(name, Level.FAIL, f"{certificate.of} expired {-left_s / DAY_S:.0f} days ago: {remedy}")
    text = f"{certificate.of} is valid for {left_s / DAY_S:.0f} more days"
    if left_s < EXPIRES_SOON_S:
        return Finding(name, Level.WARN, f"{text}: {remedy}")
    return Finding(name, Level.OK, text)


def _token(facts: Facts) -> Iterator[Finding]:
    credential = facts.credential
    if credential.certificate is not None:
        yield _certificate("token", credential.certificate, facts.now, "renew it, or name another by --client-cert")
    if facts.asked is None or facts.asked.status is None:
        return
    if credential.has_token:
        role = "without a role" if credential.role is None else f"of role {credential.role}"
        taken = "is shown" if facts.trust is Trust.NONE else "is accepted"
        yield Finding("token", Level.OK, f"a token {role} {taken}; it is valid until it is rotated")
    elif credential.certificate is None:
        yield Finding("token", Level.OK, "none used; the lighthouse lets this host read without one")


def _clock(asked: Asked, status: LighthouseStatus) -> Finding:
    """Compare this host's clock with the lighthouse's.

    The lighthouse reads its clock between the request and the answer. Any time between these two counts as equal.
    """
    ahead_s = max(status.now_unix_s - asked.ended_at, 0.0)
    behind_s = max(asked.began_at - status.now_unix_s, 0.0)
    apart_s = max(ahead_s, behind_s)
    if apart_s <= CLOCKS_DIFFER_S:
        return Finding("clock", Level.OK, f"this host's clock is within {CLOCKS_DIFFER_S:g} s of the lighthouse's")
    which = "behind" if ahead_s else "ahead of"
    return Finding(
        "clock",
        Level.WARN,
        f"this host's clock is {apart_s:.1f} s {which} the lighthouse's: times in logs and incidents do not match, "
        "and a difference of a day makes certificates invalid; run NTP on both hosts",
    )


def _versions(facts: Facts) -> Finding:
    status = None if facts.asked is None else facts.asked.status
    packages = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    torch, oldest = _release(facts.packages.get("torch", "")), _release(facts.oldest_torch)
    if torch and torch < oldest:
        return Finding(
            "versions",
            Level.FAIL,
            f"torch {facts.packages['torch']} is too old: training needs {facts.oldest_torch} or newer, because the "
            f"store of a replica group does not start with an older one; this host has {packages}",
        )
    if status is None or status.version == facts.version:
        return Finding("versions", Level.OK, packages)
    return Finding(
        "versions",
        Level.WARN,
        f"the lighthouse has version {status.version}, this host {facts.version}: install the same version "
        f"everywhere; this host has {packages}",
    )


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, such as (2, 13) for "2.13.0+cpu", or () if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else ()


def _store(store: StoreStatus) -> Finding:
    if store.error:
        return Finding(
            "store",
            Level.FAIL,
            f"the lighthouse's {store.kind} does not answer: {store.error}; no quorum changes until it does, and then "
            "another lighthouse may lead: check the store",
        )
    if store.kind is StoreKind.NONE:
        return Finding(
            "store",
            Level.WARN,
            "the lighthouse has no journal: a restart forgets stopped runs; start it with --journal FILE, or "
            "--store for several lighthouses",
        )
    return Finding("store", Level.OK, f"the lighthouse writes to its {store.kind}, term {store.term}")


def _sessions(status: LighthouseStatus) -> Iterator[Finding]:
    """Check the managers' sessions by the age of their last heartbeat.

    The lighthouse reaches a manager over the session that the manager opened, so a heartbeat proves that both
    directions work.
    """
    members = [(job.job, member) for job in status.jobs for member in job.members]
    lost = [(job, member) for job, member in members if member.state is MemberState.EXPIRED]
    alive = len(members) - len(lost)
    if not members:
        yield Finding("sessions", Level.OK, "no manager has connected to the lighthouse yet")
        return
    if alive:
        oldest_s = max(m.heartbeat_age_s for _, m in members if m.state is not MemberState.EXPIRED)
        managers = "1 manager" if alive == 1 else f"{alive} managers"
        text = f"{managers} connected to the lighthouse, oldest heartbeat {oldest_s:.1f} s old"
        yield Finding("sessions", Level.OK, text)
    for job, member in lost[:NAMED]:
        yield Finding(
            "sessions",
            Level.WARN,
            f"no heartbeat from {member.replica_id} of job {job} at {member.address or 'no address'} for "
            f"{member.heartbeat_age_s:.0f} s: its host or manager died, or cannot reach the lighthouse; check its log",
        )
    yield from _others("sessions", Level.WARN, len(lost))


def _managers(managers: tuple[ManagerSeen, ...]) -> Iterator[Finding]:
    unreached = [manager for manager in managers if manager.error]
    cut_off = [manager for manager in managers if manager.lighthouse_error is not None]
    if reached := len(managers) - len(unreached):
        yield Finding("managers", Level.OK, f"this host reaches {reached} of {len(managers)} managers")
    for manager in unreached[:NAMED]:
        yield Finding(
            "managers",
            Level.FAIL,
            f"{manager.replica_id} of job {manager.job}: {manager.error}; the lighthouse receives its heartbeats, so "
            "check its --advertise and the firewall between this host and the manager",
        )
    yield from _others("managers", Level.FAIL, len(unreached))
    for manager in cut_off[:NAMED]:
        yield Finding(
            "managers",
            Level.FAIL,
            f"{manager.replica_id} of job {manager.job} at {manager.address} does not reach the lighthouse: "
            f"{manager.lighthouse_error}",
        )
    yield from _others("managers", Level.FAIL, len(cut_off))


def _others(name: str, level: Level, count: int) -> Iterator[Finding]:
    if count > NAMED:
        yield Finding(name, level, f"so do {count - NAMED} others; `lighthouse members` lists them")
