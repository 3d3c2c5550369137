"""Which client certificate is whose: a small TOML file, by the names in certificates (SPIFFE ids and DNS names).

    "spiffe://example.org/operators/*"                 = { role = "operate" }
    "spiffe://example.org/train/{job}/{replica_id}"    = { role = "join" }
    "*.workers.example.org"                            = { role = "join", job = "llm" }
    "prometheus.example.org"                           = { role = "view" }

- The first line that fits one of a certificate's names decides.
- `*` stands for any one part of a name: what is between two slashes of a SPIFFE id, or between two dots of a DNS name.
- `{job}` and `{replica_id}` stand for one part, too, and bind the certificate to it: it then acts in that job, and as
  that replica group, alone. `job = "..."` and `replica_id = "..."` bind it to one that its name does not tell.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lighthouse_protocol.identity import check_name
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules.access import Principal, Role

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
