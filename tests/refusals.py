"""What a machine's refusal of a call is compared with."""

from dataclasses import dataclass

from lighthouse_protocol.refusals import LighthouseError


@dataclass(frozen=True, eq=False)
class Refused:
    """Equal to one of those `effects` for that call, with an error of that kind whose message has all `words`."""

    effects: tuple[type, ...]
    call: int
    kind: type[LighthouseError]
    words: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self.effects):
            return False
        call, error = other.call, other.error
        return (call, type(error)) == (self.call, self.kind) and all(word in str(error) for word in self.words)
