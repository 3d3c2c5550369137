"""A small key-value space for each generation, fenced: a rank of an older generation neither reads nor writes.

Old spaces are dropped after a few generations, and each is limited, so memory is flat however often a job restarts.
"""

from collections.abc import Iterable, Iterator

from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import InvalidRequest, LimitReached, UnknownName, WrongState

SPACES_KEPT = 4
MAX_KEYS = 4096
MAX_NAME_CHARS = 256
MAX_VALUE_BYTES = 4096

Row = tuple[int, KeyKind, str, bytes]
"""generation, kind, name, value: what is written down of one key."""


def key_text(generation: int, kind: KeyKind, name: str) -> str:
    """As the documents write it."""
    return f"{kind}_{generation}_{name}"


class KeySpaces:
    def __init__(self, number: int = -1, rows: Iterable[Row] = ()) -> None:
        self._number = number
        self._spaces: dict[int, dict[tuple[KeyKind, str], bytes]] = {}
        for generation, kind, name, value in rows:
            self._spaces.setdefault(generation, {})[kind, name] = value
        self._drop_old()

    @property
    def generations(self) -> list[int]:
        return sorted(self._spaces)

    def advance(self, number: int) -> None:
        """Generation `number` has formed: all others are fenced off."""
        self._number = number
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

    def add(self, generation: int, kind: KeyKind, name: str, amount: int) -> tuple[int, Row]:
        """The sum and what is to be written down; a key that is not there counts as 0."""
        raw = self._fenced(generation).get((kind, name), b"0")
        try:
            total = int(raw) + amount
        except ValueError:
            raise WrongState(f"key: {key_text(generation, kind, name)} is not a number") from None
        return total, self.put(generation, kind, name, str(total).encode())

    def get(self, generation: int, kind: KeyKind, name: str) -> bytes:
        space = self._fenced(generation)
        if (kind, name) not in space:
            raise UnknownName(f"key: {key_text(generation, kind, name)} was not set")
        return space[kind, name]

    @property
    def number(self) -> int:
        """The present generation; -1: none yet."""
        return self._number

    def present(self, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """All keys of the present generation. Raises WrongState if `generation` is another one."""
        space = self._spaces.get(self._number, {}) if generation is None else self._fenced(generation)
        return dict(space)

    def list_all(self) -> Iterator[tuple[str, bytes]]:
        """For an operator: every key that is kept, old spaces too."""
        for generation in self.generations:
            for (kind, name), value in sorted(self._spaces[generation].items()):
                yield key_text(generation, kind, name), value

    def _fenced(self, generation: int) -> dict[tuple[KeyKind, str], bytes]:
        if generation != self._number:
            now = f"generation {self._number}" if self._number >= 0 else "none yet"
            raise WrongState(f"generation: {generation} is not the present one ({now}); say ready, and wait for it")
        return self._spaces.setdefault(generation, {})

    def _drop_old(self) -> None:
        for generation in self.generations[:-SPACES_KEPT]:
            del self._spaces[generation]


def _check(name: str, value: bytes) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"has {len(name)} characters; 1 to {MAX_NAME_CHARS} are allowed", field="key")
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidRequest(f"has {len(value)} bytes; at most {MAX_VALUE_BYTES}", field="value")
