"""A small key-value space for each generation, fenced: a rank of an older generation neither reads nor writes.

Whoever is in the present generation, and a person, may read what earlier ones wrote: that is what a restarted function
finds again. Only the newest few spaces with keys are kept, and each is limited, so memory is flat however often a job
restarts.
"""

from collections.abc import Iterable

from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import InvalidRequest, LimitReached, UnknownName, WrongState

SPACES_KEPT = 4
MAX_KEYS = 4096
MAX_NAME_CHARS = 256
MAX_VALUE_BYTES = 4096

Row = tuple[int, KeyKind, str, bytes]
"""generation, kind, name, value: what is written down of one key."""


def key_text(generation: int, kind: KeyKind, name: str) -> str:
    """The text form of the key."""
    return f"{kind}_{generation}_{name}"


class KeySpaces:
    def __init__(self, number: int = -1, rows: Iterable[Row] = ()) -> None:
        self.number = number
        """The present generation; -1: none yet."""
        self._spaces: dict[int, dict[tuple[KeyKind, str], bytes]] = {}
        for generation, kind, name, value in rows:
            self._spaces.setdefault(generation, {})[kind, name] = value
        self._drop_old()

    @property
    def generations(self) -> list[int]:
        return sorted(self._spaces)

    def advance(self, number: int) -> None:
        """Generation `number` has formed: all others are fenced off."""
        self.number = number
        self._spaces[number] = {}
        self._drop_old()

    def put(self, generation: int, kind: KeyKind, name: str, value: bytes) -> Row:
        """What is to be written down before it is told. Raises a refusal, and then has changed nothing."""
        space = self._fenced(generation)
        _check(name, value)
        if (kind, name) not in space and len(space) >= MAX_KEYS:
            raise LimitReached(f"key: generation {generation} has {MAX_KEYS} keys already")
        space[kind, name] = value
        return generation, kind, name, value

    def present(self, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """All keys of the present generation. Raises WrongState if `generation` is another one."""
        space = self._spaces.get(self.number, {}) if generation is None else self._fenced(generation)
        return dict(space)

    def previous(self, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """Each key's value from the newest earlier generation that set it. `generation`: as of `present`."""
        if generation is not None:
            self._fenced(generation)
        newest: dict[tuple[KeyKind, str], bytes] = {}
        for earlier in self.generations:
            if earlier != self.number:
                newest |= self._spaces[earlier]
        return newest

    def of(self, number: int, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """All keys of generation `number`. Raises UnknownName if they are not kept. `generation`: as of `present`."""
        if generation is not None:
            self._fenced(generation)
        if number != self.number and number not in self._spaces:
            kept = ", ".join(map(str, self.generations)) or "none"
            raise UnknownName(f"generation: of {number} no keys are kept; generations that have keys: {kept}")
        return dict(self._spaces.get(number, {}))

    def _fenced(self, generation: int) -> dict[tuple[KeyKind, str], bytes]:
        if generation != self.number:
            now = f"generation {self.number}" if self.number >= 0 else "none yet"
            raise WrongState(f"generation: {generation} is not the current one ({now}); report ready and wait")
        return self._spaces.setdefault(generation, {})

    def _drop_old(self) -> None:
        self._spaces = {number: space for number, space in self._spaces.items() if space or number == self.number}
        for generation in self.generations[:-SPACES_KEPT]:
            del self._spaces[generation]


def _check(name: str, value: bytes) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"has {len(name)} characters; 1 to {MAX_NAME_CHARS} are allowed", field="key")
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidRequest(f"has {len(value)} bytes; at most {MAX_VALUE_BYTES}", field="value")
