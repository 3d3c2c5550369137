"""Who may do what: roles, and the one table of every RPC and every HTTP route.

A server asks `check` before a handler runs, and does not start with a method or a route that the table lacks.
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
    """What a credential is for. OPERATE includes all; VIEW and JOIN include PROBE, and not each other."""

    PROBE = "probe"  # learn that a daemon is there
    VIEW = "view"  # read status and metrics
    JOIN = "join"  # train: be a group, a rank, a supervisor
    OPERATE = "operate"  # kill, drain, stop; read what ranks print and where they are in their code


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller, by its credential. `name` is for logs and the audit: never a secret. `job` and `replica_id`: it is
    bound to these; empty: to none."""

    name: str
    roles: frozenset[Role]
    job: str = ""
    replica_id: str = ""

    def may(self, needed: frozenset[Role]) -> bool:
        """Whether one of `needed` is among the roles, or included in one of them."""
        return Role.OPERATE in self.roles or Role.PROBE in needed or not needed.isdisjoint(self.roles)


NOBODY = Principal("none", frozenset())
"""A caller without a credential."""

Needed = frozenset[Role]  # any of them
_ACTS = frozenset({"Kill", "Drain", "StopRun", "ResumeRun", "POST /kill", "POST /drain", "POST /stop", "POST /resume"})

_PROBE: Needed = frozenset({Role.PROBE})
_VIEW: Needed = frozenset({Role.VIEW})
_JOIN: Needed = frozenset({Role.JOIN})
_MEMBER_OR_VIEW: Needed = frozenset({Role.JOIN, Role.VIEW})  # without what ranks print
_OPERATE: Needed = frozenset({Role.OPERATE})

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
    "Stacks": _OPERATE,
    "Kill": _OPERATE,
    "Drain": _OPERATE,
    "StopRun": _OPERATE,
    "ResumeRun": _OPERATE,
}
_MANAGER: Mapping[str, Needed] = {
    "Quorum": _JOIN,
    "CheckpointAddress": _PROBE,  # of peers: the handler asks for a proof that they are
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
    "GET /": _PROBE,  # the page's own text; what it shows comes by /events and /status
    "GET /control": _PROBE,  # what the caller may do
    "POST /login": _PROBE,
    "GET /metrics": _VIEW,
    "GET /status": _VIEW,
    "GET /events": _VIEW,
    "GET /incidents/{id}": _OPERATE,
    "GET /log": _OPERATE,  # it names hosts, and quotes what callers have sent
    "POST /kill": _OPERATE,
    "POST /drain": _OPERATE,
    "POST /stop": _OPERATE,
    "POST /resume": _OPERATE,
    "POST /stacks": _OPERATE,
}
POLICY: Mapping[str, Needed] = {
    **{f"/{service}/{method}": needed for service, methods in _SERVICES.items() for method, needed in methods.items()},
    **_ROUTES,
}
"""By the path of an RPC, and by method and path of an HTTP route."""


def needed(path: str) -> Needed:
    """Raises KeyError for what has no entry: a server with such a method does not start."""
    try:
        return POLICY[path]
    except KeyError:
        raise KeyError(f"{path} has no entry in lighthouse_protocol/rules/access.py: say which role it needs") from None


def is_control(path: str) -> bool:
    """Whether it acts on a job, or shows what ranks print: refusals of it are worth an audit line."""
    return POLICY[path] == _OPERATE


def name_of(path: str) -> str:
    """What people call it: Kill, or POST /kill."""
    return path.rpartition("/")[2] if path.startswith("/") else path


def is_act(path: str) -> bool:
    """Whether it changes what runs: each such call is worth an audit line."""
    return name_of(path) in _ACTS


def _way_to_show(path: str) -> str:
    if path in _ROUTES:
        return "sign in on the page with its output, or send it as `Authorization: Bearer ...`"
    return "set --lighthouse or LIGHTHOUSE_ADDRESS to its output"


def check(path: str, principal: Principal, port: int = LIGHTHOUSE_PORT) -> None:
    """Raises NotPermitted that names the remedy. `port`: of the lighthouse's gRPC."""
    wanted = needed(path)
    if principal.may(wanted):
        return
    words = " or ".join(sorted(wanted))
    what = name_of(path)
    remedy = _remedy(path, wanted, port)
    if principal is NOBODY:
        raise NotPermitted(f"{what} needs a credential of role {words}, and the caller shows none: {remedy}")
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
    verb = "operate" if wanted == _OPERATE else "join" if Role.JOIN in wanted else "view"
    return f"run {token_command(port, verb)} on the lighthouse's host, and {_way_to_show(path)}"


_BOUND = "the lighthouse's --tls-identities file defines what a certificate is bound to"


def check_bounds(principal: Principal, job: str, replica_id: str = "") -> None:
    """Raises NotPermitted where the principal is bound to another job, or another replica group, than it acts on.
    `replica_id` is empty for what each group may do for itself; see check_bounds_on_run() for what ends others, too."""
    if principal.job and principal.job != job:
        raise NotPermitted(f"{principal.name} is bound to job {principal.job}, and may not act in job {job}; {_BOUND}")
    if principal.replica_id and replica_id and principal.replica_id != replica_id:
        raise NotPermitted(
            f"{principal.name} is bound to replica group {principal.replica_id}, and may not act as or on "
            f"{replica_id}; {_BOUND}"
        )


def check_bounds_on_run(principal: Principal, job: str, what: str) -> None:
    """As check_bounds(), for `what` an operator does to a run: it has ranks of other groups, too."""
    check_bounds(principal, job)
    if principal.replica_id:
        raise NotPermitted(
            f"{principal.name} is bound to replica group {principal.replica_id}, and {what} acts on all groups of a "
            f"run; {_BOUND}"
        )


# -- identities ---------------------------------------------------------------
#
# Which client certificate is whose: a small TOML file, by the names in certificates (SPIFFE ids and DNS names).
#
#     "spiffe://example.org/operators/*"                 = { role = "operate" }
#     "spiffe://example.org/train/{job}/{replica_id}"    = { role = "join" }
#     "*.workers.example.org"                            = { role = "join", job = "llm" }
#     "prometheus.example.org"                           = { role = "view" }
#
# - The first line that fits one of a certificate's names decides.
# - `*` stands for any one part of a name: what is between two slashes of a SPIFFE id, or between two dots of a DNS
#   name.
# - `{job}` and `{replica_id}` stand for one part, too, and bind the certificate to it: it then acts in that job, and
#   as that replica group, alone. `job = "..."` and `replica_id = "..."` bind it to one that its name does not tell.

FIELD = "--tls-identities"
MAX_LINES = 10_000
MAX_NAME_CHARS = 2048  # of a SPIFFE id
_SPIFFE = "spiffe://"
_TERMS = {"role", "job", "replica_id"}
_HOLE = re.compile(r"\*|\{(job|replica_id)\}")
_DNS = re.compile(r"[a-z0-9_*{}-]+(\.[a-z0-9_*{}-]+)*")
_ROLES = (Role.JOIN, Role.VIEW, Role.OPERATE)


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
    """Without lines: no certificate has a role."""

    def __init__(self, lines: Iterable[_Line] = ()) -> None:
        self._lines = tuple(lines)

    def principal(self, names: Iterable[str]) -> Principal | None:
        """Whose certificate has these `names`. None: it has none, so that nothing tells it from others."""
        names = tuple(map(_lowered, filter(_is_clean, names)))
        for line in self._lines:
            for name in names:
                if (principal := line.principal(name)) is not None:
                    return principal
        return Principal(f"certificate {names[0]}", frozenset()) if names else None


def parse_identities(text: str) -> Identities:
    """Raises InvalidRequest that names the line and the remedy."""
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
            f'{name!r} is not as "NAME" = {{ role = "join" }}: set the name in quotation marks', field=FIELD
        )
    if unknown := sorted(set(terms) - _TERMS):
        raise InvalidRequest(f"{name!r} has {unknown[0]!r}; there are role, job and replica_id", field=FIELD)
    role = terms.get("role", "")
    if role not in _ROLES:
        raise InvalidRequest(f"{name!r} has role {role!r}; there are {', '.join(_ROLES)}", field=FIELD)
    pattern = _pattern(name)
    for term in ("job", "replica_id"):
        if term in terms:
            check_name(terms[term], f"{FIELD}: {name!r}: {term}")
            if term in pattern.groupindex:
                raise InvalidRequest(f"{name!r} has its {term} twice", field=FIELD)
    return _Line(pattern, Role(role), terms.get("job", ""), terms.get("replica_id", ""))


def _pattern(name: str) -> re.Pattern[str]:
    """Raises InvalidRequest."""
    is_spiffe = name.startswith(_SPIFFE)
    plain = _lowered(name)
    if not (is_spiffe or _DNS.fullmatch(plain)) or not _is_clean(plain):
        raise InvalidRequest(f"{name!r} is no SPIFFE id (spiffe://...) and no DNS name", field=FIELD)
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
        raise InvalidRequest(f"{name!r}: there are *, {{job}} and {{replica_id}}", field=FIELD)
    return re.compile(written + re.escape(rest))


def _is_clean(name: str) -> bool:
    """Whether it may be logged. A CA that signs another one has its reasons, and no line fits it."""
    return name.isascii() and name.isprintable() and " " not in name and len(name) <= MAX_NAME_CHARS


def _lowered(name: str) -> str:
    """The case of a DNS name does not count."""
    return name if name.startswith(_SPIFFE) else name.lower()


# -- proof --------------------------------------------------------------------
#
# What shows that a peer is the one that it was, or a member of the same quorum: secrets, digests and proofs.
#
# 1. A secret is random text, made by the one that is to be recognised. It is shown to one daemon, over a connection
#    that it trusts, and never logged, listed in a status or written to a disk: what is kept of it is its digest.
# 2. A proof shows that a peer knows a secret without showing it. It names what it is for, so that it serves for
#    nothing else, and whatever makes it good once (a nonce of the other side).
# 3. All comparisons take the same time for every wrong answer.

# What a proof is for: the first of its words.
ADDRESS_WORD = "address"  # a member asks where its peer serves its state; then quorum_id, group_rank
TARGET_WORD = "target"  # a member asks for a state; then what it asks for, and both sides' nonces
SOURCE_WORD = "source"  # a member answers that; then what it gives, and both sides' nonces
STORE_WORD = "store"  # members meet in a store under a name that nobody else can guess; then the name


def digest_of(secret: str) -> str:
    """What is kept of a secret; it cannot be shown in its place. Empty for no secret."""
    return hashlib.sha256(_bytes(secret)).hexdigest() if secret else ""


def short_name(incarnation: str) -> str:
    """For people, who tell one start of a process from the next by it; whoever may look learns no incarnation."""
    return digest_of(incarnation)[:8]


def is_shown(secret: str, digest: str) -> bool:
    """Whether `secret` is the one with that digest; nothing is, where there is none."""
    return bool(secret and digest) and is_same(digest_of(secret), digest)


def is_same(shown: str, secret: str) -> bool:
    """Of what is kept as it is. No secret is like none."""
    return bool(secret) and hmac.compare_digest(_bytes(shown), _bytes(secret))


def prove(secret: str, *words: str | int) -> str:
    """That the caller knows `secret`, for what `words` say: hexadecimal, 64 characters. Empty without a secret."""
    if not secret:
        return ""
    message = "".join(f"{len(word)}:{word}" for word in map(str, words))  # no two lists of words give one message
    return hmac.new(_bytes(secret), _bytes(message), hashlib.sha256).hexdigest()


def is_proven(proof: str, secret: str, *words: str | int) -> bool:
    """Whether `proof` is that of one who knows `secret`. Nothing is, where there is none."""
    return is_same(proof, prove(secret, *words))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
