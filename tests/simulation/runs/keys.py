"""The unary calls of the key space."""

from dataclasses import dataclass

from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import LighthouseError


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """`value` None: a read."""

    generation: int
    kind: KeyKind
    name: str
    value: bytes | None = None
    slot: int = 0
    secret: str = ""


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    request: KeyRequest
    value: bytes | None
    error: LighthouseError | None
