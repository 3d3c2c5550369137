"""Access control: roles, permissions per RPC and HTTP route, client certificates, and proofs of knowledge of a secret.

A server calls `check` before each handler. It refuses to start if POLICY lacks one of its methods or routes.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lighthouse_protocol.coordinator import token_command
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import LIGHTHOUSE_PORT, MANAGER_SECRET_VARIABLE
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted


class Role(StrEnum):
    """Role of a credential. OPERATE includes all others except CHAOS. All include PROBE, and CHAOS includes VIEW."""

    PROBE = "probe"  # check that a daemon is running
    VIEW = "view"  # read status and metrics
    JOIN = "join"  # train as a group, a rank or a supervisor
    OPERATE = "operate"  # kill, drain and stop; read the output and the stacks of ranks
    CHAOS = "chaos"  # inject faults


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller, identified by its credential."""

    name: str  # for logs and the audit; contains no secret
    roles: frozenset[Role]
    job: str = ""  # the only job in which it may act; empty for any
    replica_id: str = ""  # the only replica group for which it may act; empty for any

    def is_allowed(self, needed: frozenset[Role]) -> bool:
        """Return whether one of the principal's roles is in `needed` or includes a role in `needed`."""
        held = self.roles | _VIEW if Role.CHAOS in self.roles else self.roles
        return (Role.OPERATE in held and needed != _CHAOS) or Role.PROBE in needed or not needed.isdisjoint(held)


NOBODY = Principal("none", frozenset())  # a caller without a credential

Needed = frozenset[Role]  # any one of these roles is enough
_ACTS = frozenset(
    {"Kill", "Drain", "StopRun", "ResumeRun", "Inject", "POST /kill", "POST /drain", "POST /stop", "POST /resume"}
)

_PROBE: Needed = frozenset({Role.PROBE})
_VIEW: Needed = frozenset({Role.VIEW})
_JOIN: Needed = frozenset({Role.JOIN})
_MEMBER_OR_VIEW: Needed = frozenset({Role.JOIN, Role.VIEW})  # the answer does not contain output of ranks
_OPERATE: Needed = frozenset({Role.OPERATE})
_CHAOS: Needed = frozenset({Role.CHAOS})

_LIGHTHOUSE: Mapping[str, Needed] = {
    "Quorum": _JOIN,
    "Heartbeat": _JOIN,
    "Session": _JOIN,
    "Rank": _JOIN,
    "Supervise": _JOIN,
    "PutKey": _JOIN,
    "GetKeys": _JOIN,
    "Status": _MEMBER_OR_VIEW,
    "Runs": _MEMBER_OR_VIEW,
    "Incidents": _MEMBER_OR_VIEW,
    "Incident": _OPERATE,
    "Ledger": _MEMBER_OR_VIEW,
    "Stacks": _OPERATE,
    "Kill": _OPERATE,
    "Drain": _OPERATE,
    "StopRun": _OPERATE,
    "ResumeRun": _OPERATE,
    "Inject": _CHAOS,
}
_MANAGER: Mapping[str, Needed] = {
    "Quorum": _JOIN,
    "CheckpointAddress": _PROBE,  # the handler requires a proof of quorum membership
    "ShouldCommit": _JOIN,
    "Watch": _JOIN,
    "Report": _JOIN,
    "Node": _JOIN,
    "Status": _MEMBER_OR_VIEW,
    "Kill": _OPERATE,
}
_SERVICES: Mapping[str, Mapping[str, Needed]] = {
    "lighthouse.v1.LighthouseService": _LIGHTHOUSE,
    "LighthouseService": _LIGHTHOUSE,
    "torchft.LighthouseService": {"Quorum": _JOIN, "Heartbeat": _JOIN},
    "manager.v1.ManagerService": _MANAGER,
    "ManagerService": _MANAGER,
    "torchft.ManagerService": {
        "Quorum": _JOIN,
        "CheckpointMetadata": _PROBE,
        "ShouldCommit": _JOIN,
        "Kill": _OPERATE,
    },
    "grpc.health.v1.Health": {"Check": _PROBE, "Watch": _PROBE, "List": _PROBE},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _PROBE},
}
_ROUTES: Mapping[str, Needed] = {
    "GET /livez": _PROBE,
    "GET /readyz": _PROBE,
    "GET /": _PROBE,  # static; the page requests its data from /events and /status
    "GET /control": _PROBE,  # the caller's own permissions
    "POST /login": _PROBE,
    "GET /metrics": _VIEW,
    "GET /status": _VIEW,
    "GET /events": _VIEW,
    "GET /incidents/{id}": _OPERATE,
    "GET /log": _OPERATE,  # contains host names and texts that callers sent
    "POST /kill": _OPERATE,
    "POST /preemption": _OPERATE,  # of a manager
    "POST /drain": _OPERATE,
    "POST /stop": _OPERATE,
    "POST /resume": _OPERATE,
    "POST /stacks": _OPERATE,
}
# Keys: the path of an RPC, or the method and path of an HTTP route.
POLICY: Mapping[str, Needed] = {
    **{f"/{service}/{method}": needed for service, methods in _SERVICES.items() for method, needed in methods.items()},
    **_ROUTES,
}


def needed(path: str) -> Needed:
    """Return the roles that may use `path`. Raise KeyError if POLICY does not list `path`."""
    try:
        return POLICY[path]
    except KeyError:
        raise KeyError(f"{path} has no entry in lighthouse_protocol/rules/access.py: add the role it needs") from None


def is_control(path: str) -> bool:
    """Return whether `path` needs the role OPERATE or CHAOS. The audit log records refused calls to such paths."""
    return POLICY[path] in (_OPERATE, _CHAOS)


def method_name(path: str) -> str:
    """Return the method of an RPC path (Kill), or an HTTP route unchanged (POST /kill)."""
    return path.rpartition("/")[2] if path.startswith("/") else path


def is_mutating(path: str) -> bool:
    """Return whether `path` changes a job. The audit log records every call to such a path."""
    return method_name(path) in _ACTS


def check(path: str, principal: Principal, port: int = LIGHTHOUSE_PORT) -> None:
    """Raise NotPermitted if the principal may not use `path`.

    The error message suggests a remedy. `port` is the lighthouse's gRPC port, for the command in that remedy.
    """
    wanted = needed(path)
    if principal.is_allowed(wanted):
        return
    words = " or ".join(sorted(wanted))
    what = method_name(path)
    remedy = _remedy(path, wanted, port)
    if principal is NOBODY:
        raise NotPermitted(f"{what} needs a credential of role {words}, but the caller presented none: {remedy}")
    if not principal.roles:
        raise NotPermitted(
            f"{what} needs a credential of role {words}; {principal.name} has no role: add it to the lighthouse's "
            "--tls-identities file, or also show a token"
        )
    has = " and ".join(sorted(principal.roles))
    raise NotPermitted(f"{what} needs a credential of role {words}; {principal.name} has role {has}: {remedy}")


def _remedy(path: str, wanted: Needed, port: int) -> str:
    if "ManagerService/" in path:
        return (
            f"set {MANAGER_SECRET_VARIABLE} to the secret of this group, which its ranks and supervisors have; "
            "operators ask the lighthouse, by `lighthouse kill`"
        )
    verb = (
        "chaos" if wanted == _CHAOS else "operate" if wanted == _OPERATE else "join" if Role.JOIN in wanted else "view"
    )
    use = "set --lighthouse or LIGHTHOUSE_ADDRESS to its output"
    if path in _ROUTES:
        use = "sign in on the page with its output, or send it as `Authorization: Bearer ...`"
    return f"run {token_command(port, verb)} on the lighthouse's host, and {use}"


_BOUND = "the lighthouse's --tls-identities file defines what a certificate is bound to"


def check_bounds(principal: Principal, job: str, replica_id: str = "") -> None:
    """Raise NotPermitted if the principal is bound to another job or replica group.

    With an empty `replica_id`, check the job only. For actions on a whole run, use check_bounds_on_run().
    """
    if principal.job and principal.job != job:
        raise NotPermitted(f"{principal.name} is bound to job {principal.job}, and may not act in job {job}; {_BOUND}")
    if principal.replica_id and replica_id and principal.replica_id != replica_id:
        raise NotPermitted(
            f"{principal.name} is bound to replica group {principal.replica_id}, and may not act as or on "
            f"{replica_id}; {_BOUND}"
        )


def check_bounds_on_run(principal: Principal, job: str, what: str) -> None:
    """Raise NotPermitted if the principal is bound to another job, or to a single replica group of the run.

    `what` names the action in the message.
    """
    check_bounds(principal, job)
    if principal.replica_id:
        raise NotPermitted(
            f"{principal.name} is bound to replica group {principal.replica_id}, and {what} acts on all groups of a "
            f"run; {_BOUND}"
        )


# Client certificates. A TOML file maps the names in certificates (SPIFFE ids and DNS names) to roles:
#
#     "spiffe://example.org/operators/*"                 = { role = "operate" }
#     "spiffe://example.org/train/{job}/{replica_id}"    = { role = "join" }
#     "*.workers.example.org"                            = { role = "join", job = "llm" }
#     "prometheus.example.org"                           = { role = "view" }
#
# - The first line that matches a name of the certificate decides.
# - `*` matches one part of a name, between two slashes of a SPIFFE id or between two dots of a DNS name.
# - `{job}` and `{replica_id}` match one part too, and bind the certificate to it: it may act only in that job, or for
#   that replica group. `job = "..."` and `replica_id = "..."` bind a certificate whose name does not contain them.

FIELD = "--tls-identities"
MAX_LINES = 10_000
MAX_NAME_CHARS = 2048  # the limit for a SPIFFE id
_SPIFFE = "spiffe://"
_TERMS = {"role", "job", "replica_id"}
_HOLE = re.compile(r"\*|\{(job|replica_id)\}")
_DNS = re.compile(r"[a-z0-9_*{}-]+(\.[a-z0-9_*{}-]+)*")
_ROLES = (Role.JOIN, Role.VIEW, Role.OPERATE, Role.CHAOS)


@dataclass(frozen=True, slots=True)
class _Line:
    pattern: re.Pattern[str]
    role: Role
    job: str
    replica_id: str

    def principal(self, name: str) -> Principal | None:
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        bound = found.groupdict()
        job, replica_id = bound.get("job", self.job), bound.get("replica_id", self.replica_id)
        return Principal(f"certificate {name}", frozenset({self.role}), job, replica_id)


class Identities:
    """The lines of an identities file, which map the names in client certificates to roles."""

    def __init__(self, lines: Iterable[_Line] = ()) -> None:
        self._lines = tuple(lines)

    def principal(self, names: Iterable[str]) -> Principal | None:
        """Return the principal for a certificate, according to the first line that matches one of its names.

        Return a principal without roles if no line matches, or None if every name is malformed.
        """
        names = tuple(map(_lowered, filter(_is_clean, names)))
        for line in self._lines:
            for name in names:
                if (principal := line.principal(name)) is not None:
                    return principal
        return Principal(f"certificate {names[0]}", frozenset()) if names else None


def parse_identities(text: str) -> Identities:
    """Parse an identities file. Raise InvalidRequest, which quotes the faulty line, if the file is malformed."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise InvalidRequest(f"is not TOML: {e}", field=FIELD) from None
    if len(document) > MAX_LINES:
        raise InvalidRequest(f"has {len(document)} lines; at most {MAX_LINES} are allowed", field=FIELD)
    return Identities(_line(name, terms) for name, terms in document.items())


def _line(name: str, terms: Any) -> _Line:
    if not isinstance(terms, Mapping) or not all(isinstance(value, str) for value in terms.values()):
        raise InvalidRequest(
            f'{name!r} is not of the form "NAME" = {{ role = "join" }}; put the name in quotation marks', field=FIELD
        )
    if unknown := sorted(set(terms) - _TERMS):
        raise InvalidRequest(f"{name!r} has {unknown[0]!r}; only role, job and replica_id are allowed", field=FIELD)
    role = terms.get("role", "")
    if role not in _ROLES:
        raise InvalidRequest(f"{name!r} has role {role!r}; the roles are {', '.join(_ROLES)}", field=FIELD)
    pattern = _pattern(name)
    for term in ("job", "replica_id"):
        if term in terms:
            check_name(terms[term], f"{FIELD}: {name!r}: {term}")
            if term in pattern.groupindex:
                raise InvalidRequest(f"{name!r} has its {term} twice", field=FIELD)
    return _Line(pattern, Role(role), terms.get("job", ""), terms.get("replica_id", ""))


def _pattern(name: str) -> re.Pattern[str]:
    is_spiffe = name.startswith(_SPIFFE)
    plain = _lowered(name)
    if not (is_spiffe or _DNS.fullmatch(plain)) or not _is_clean(plain):
        raise InvalidRequest(f"{name!r} is neither a SPIFFE id (spiffe://...) nor a DNS name", field=FIELD)
    between, one, at, written = "/" if is_spiffe else ".", "[^/]+" if is_spiffe else "[^.]+", 0, ""
    for hole in _HOLE.finditer(plain):
        if plain[hole.start() - 1 : hole.start()] not in ("", between) or plain[hole.end() : hole.end() + 1] not in (
            "",
            between,
        ):
            raise InvalidRequest(f"{name!r}: {hole[0]} stands for one whole part between two {between!r}", field=FIELD)
        if hole[1] and f"?P<{hole[1]}>" in written:
            raise InvalidRequest(f"{name!r} has {hole[0]} twice", field=FIELD)
        written += re.escape(plain[at : hole.start()]) + (f"(?P<{hole[1]}>{one})" if hole[1] else one)
        at = hole.end()
    rest = plain[at:]
    if set("*{}") & set(_HOLE.sub("", plain)):
        raise InvalidRequest(f"{name!r}: the only placeholders are *, {{job}} and {{replica_id}}", field=FIELD)
    return re.compile(written + re.escape(rest))


def _is_clean(name: str) -> bool:
    # Names are logged. A CA may sign unusual names; no line matches them.
    return name.isascii() and name.isprintable() and " " not in name and len(name) <= MAX_NAME_CHARS


def _lowered(name: str) -> str:
    return name if name.startswith(_SPIFFE) else name.lower()


# Secrets, digests and proofs: how a peer proves that it is the same process as earlier, or a member of the same quorum.
#
# 1. A secret is random text, generated by the process that wants to be recognised. It is sent to one daemon, over a
#    trusted connection. The daemon stores its digest only; the secret is never logged, listed in a status or written to
#    disk.
# 2. A proof shows knowledge of a secret without sending it. It covers its purpose, so it cannot be used for anything
#    else, and it can cover a nonce from the other side, which makes it valid only once.
# 3. Comparisons take constant time.

# The purpose of a proof is its first word.
ADDRESS_WORD = "address"  # a member requests its peer's checkpoint address; then quorum_id, group_rank
TARGET_WORD = "target"  # a member requests a state; then the request, and both sides' nonces
SOURCE_WORD = "source"  # the answer to that; then the reply, and both sides' nonces
STORE_WORD = "store"  # an unguessable prefix under which members connect in a store; then the prefix's name


def digest_of(secret: str) -> str:
    """Return the SHA-256 digest to store instead of a secret, or an empty string for an empty secret."""
    # Called for each hello, so `_bytes` is inlined.
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest() if secret else ""


def short_name(incarnation: str) -> str:
    """Return eight characters that identify an incarnation without revealing it."""
    return digest_of(incarnation)[:8]


def is_shown(secret: str, digest: str) -> bool:
    """Return whether `secret` has the given digest. An empty secret or digest never matches."""
    return bool(secret and digest) and is_same(digest_of(secret), digest)


def is_same(shown: str, secret: str) -> bool:
    """Return whether `shown` equals `secret`, in constant time. An empty secret never matches."""
    return bool(secret) and hmac.compare_digest(_bytes(shown), _bytes(secret))


def prove(secret: str, *words: str | int) -> str:
    """Return an HMAC-SHA256 in hexadecimal that proves knowledge of `secret`, or an empty string if that is empty.

    The proof covers `words`: its purpose, such as ADDRESS_WORD, followed by the request's values and nonces.
    """
    if not secret:
        return ""
    message = "".join(f"{len(word)}:{word}" for word in map(str, words))  # unambiguous for any list of words
    return hmac.new(_bytes(secret), _bytes(message), hashlib.sha256).hexdigest()


def is_proven(proof: str, secret: str, *words: str | int) -> bool:
    """Return whether prove() made `proof` from the same secret and words. No proof is valid for an empty secret."""
    return is_same(proof, prove(secret, *words))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
