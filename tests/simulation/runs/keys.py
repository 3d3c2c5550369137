"""The unary calls of the key space."""

from dataclasses import dataclass

from protos.generation import KeyKind
from protos.refusals import LighthouseError


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """`value` None: a read."""

    generation: int
    kind: KeyKind
    name: str
    value: bytes | None = None


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    request: KeyRequest
    value: bytes | None
    error: LighthouseError | None
