"""The tokens of a lighthouse: a file beside its certificates, which it reads again when it changes.

Each role has one token or two: the newest, and the one before it, so that a rotation cuts nobody off. Their first
letters tell a person what they are for; in logs a token is its role and six digits of its SHA-256.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lighthouse_protocol.coordinator import token_command
from lighthouse_protocol.limits import LIGHTHOUSE_PORT
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_protocol.rules.access import Principal, Role
from lighthouse_runtime.process.state_folder import write_private
from lighthouse_runtime.security.watched_file import WatchedFile

FILE = "tokens.json"
VALID_AT_A_TIME = 2
ROLES: Mapping[Role, str] = {Role.JOIN: "lhj_", Role.OPERATE: "lho_", Role.VIEW: "lhv_"}
"""The roles that have tokens, and how those begin."""


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """By role, the newest first."""

    by_role: Mapping[Role, tuple[str, ...]]

    @classmethod
    def make(cls) -> "Tokens":
        return cls({role: (_new(role),) for role in ROLES})

    @classmethod
    def read(cls, folder: Path) -> "Tokens":
        """Raises InvalidRequest that names the file, and what to do."""
        path = folder / FILE
        try:
            found = json.loads(path.read_text())
            tokens = cls({role: tuple(map(str, found[role.value])) for role in ROLES})
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InvalidRequest(
                f"cannot read {path} ({type(e).__name__}: {e}); remove the folder; the next start recreates it",
                field="--credentials",
            ) from None
        if not all(tokens.by_role.values()) or not all(map(_is_token, tokens.all())):
            raise InvalidRequest(f"{path} has a role without a token, or an empty one", field="--credentials")
        return tokens

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        content = {role.value: list(tokens) for role, tokens in self.by_role.items()}
        write_private(folder / FILE, (json.dumps(content, indent=2) + "\n").encode())

    def rotated(self, role: Role) -> "Tokens":
        """With a new token for `role`; its newest one stays valid beside it, older ones do not."""
        kept = self.by_role[role][: VALID_AT_A_TIME - 1]
        return Tokens({**self.by_role, role: (_new(role), *kept)})

    def newest(self, role: Role) -> str:
        return self.by_role[role][0]

    def all(self) -> tuple[str, ...]:
        return tuple(token for tokens in self.by_role.values() for token in tokens)

    def principal(self, shown: str, port: int = LIGHTHOUSE_PORT) -> Principal:
        """Whose token `shown` is, at the lighthouse with that gRPC port. Raises NotPermitted; how long that takes tells
        nothing about any token."""
        matching = [
            (role, token)
            for role, tokens in self.by_role.items()
            for token in tokens
            if hmac.compare_digest(token.encode(), shown.encode(errors="replace"))
        ]
        if not matching:
            role = next((role.value for role, begin in ROLES.items() if shown.startswith(begin)), "")
            raise NotPermitted(
                "the token is not one of this lighthouse's, or was rotated away: run "
                f"{token_command(port, role)} on its host, and use what it prints"
            )
        role, token = matching[0]
        return Principal(name_of(role, token), frozenset({role}))


class TokenFile(WatchedFile[Tokens]):
    """The tokens of `folder` as they are now. Raises as Tokens.read() when it is made."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE, lambda: Tokens.read(folder))


def name_of(role: Role, token: str) -> str:
    """What logs call a token."""
    return f"{role.value}-{hashlib.sha256(token.encode()).hexdigest()[:6]}"


def _new(role: Role) -> str:
    return ROLES[role] + secrets.token_urlsafe(24)


def _is_token(token: str) -> bool:
    return len(token) >= 16 and token.isascii() and token.isprintable() and " " not in token
