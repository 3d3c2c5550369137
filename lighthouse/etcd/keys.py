"""The names of what is in etcd, below one prefix:

    leader                                  who leads; bound to its lease
    term                                    how often the leader's key was claimed
    format                                  of all that follows
    forgotten                               the highest id of any job that has no key any more
    job/JOB                                 its record, or, if it was forgotten, its last id
    run/JOB/RUN                             its record
    key/JOB/RUN/GENERATION/KIND/NAME        one key of a run
    job/JOB/part/SET/N                      part N of a record that does not fit in one request; so of a run's, too

Names are percent-encoded. Records are compressed: etcd takes 1.5 MiB in one request. A record that is larger than
RECORD_BYTES is written in parts, and its own key names the set of them.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from lighthouse.quorum.rules import record as quorum_record
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse.runs.rules import record as run_record
from lighthouse.runs.rules.key_space import Row
from lighthouse.runs.rules.record import RunName, RunRecord
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import WrongState

FORMAT = 1
RECORD_BYTES = 512 * 1024
_GENERATION_DIGITS = 16
_IN_PARTS = b"parts "  # compressed records begin with another byte


class Damaged(WrongState):
    def __init__(self, key: bytes, what: str) -> None:
        super().__init__(
            f"--store: {key.decode(errors='replace')!r} in etcd {what}; name another prefix, and keep this one: a job "
            "then waits one lease"
        )


@dataclass(frozen=True, slots=True)
class Keys:
    prefix: str

    @property
    def all(self) -> bytes:
        """The beginning of each."""
        return f"{self.prefix}/".encode()

    @property
    def leader(self) -> bytes:
        return self._of("leader")

    @property
    def term(self) -> bytes:
        return self._of("term")

    @property
    def format(self) -> bytes:
        return self._of("format")

    @property
    def forgotten(self) -> bytes:
        return self._of("forgotten")

    def job(self, job: str) -> bytes:
        return self._of("job", job)

    def run(self, name: RunName) -> bytes:
        return self._of("run", *name)

    def run_keys(self, name: RunName) -> bytes:
        """The beginning of each key of a run."""
        return self._of("key", *name) + b"/"

    def run_keys_from(self, name: RunName, generation: int) -> bytes:
        """The beginning of each key of a run's `generation`, above all older ones."""
        return self.run_keys(name) + _number(generation).encode() + b"/"

    def run_key(self, run: RunName, row: Row) -> bytes:
        generation, kind, name, _ = row
        return self._of("key", *run, _number(generation), kind.value, name)

    def _of(self, *parts: str) -> bytes:
        return "/".join((self.prefix, *(quote(part, safe="") for part in parts))).encode()

    def parts(self, key: bytes) -> list[str]:
        """Return what `key` was made of, without the prefix; empty for a key that no lighthouse has made."""
        parts = [unquote(part) for part in key.decode(errors="replace").removeprefix(f"{self.prefix}/").split("/")]
        return parts if self._of(*parts) == key else []


def _number(generation: int) -> str:
    """In the order of its text."""
    return f"{generation:0{_GENERATION_DIGITS}d}"


def parse_run_key(key: bytes, parts: list[str], value: bytes) -> tuple[RunName, Row]:
    try:
        _, job, run, generation, kind, name = parts
        return (job, run), (int(generation), KeyKind(kind), name, value)
    except ValueError as e:
        raise Damaged(key, f"is not read: {e}") from e


# -- values


def parts_of(record: bytes, name: str = "") -> bytes:
    """Return the beginning of the keys of the parts of the record at that key: of one set of them, or of all."""
    return record + b"/part/" + (f"{name}/".encode() if name else b"")


def split(record: bytes, raw: bytes) -> tuple[str, list[tuple[bytes, bytes]]]:
    """Return the name of a set of parts, and the keys and values to write, the record's own key last."""
    name = hashlib.sha256(raw).hexdigest()[:16]
    pieces = [raw[start : start + RECORD_BYTES] for start in range(0, len(raw), RECORD_BYTES)]
    rows = [(parts_of(record, name) + _number(n).encode(), piece) for n, piece in enumerate(pieces)]
    return name, [*rows, (record, _IN_PARTS + name.encode())]


def join(record: bytes, raw: bytes, sets: Mapping[str, Sequence[bytes]]) -> bytes:
    """Return the record at that key, from the parts that its value names. Raises Damaged if one is missing."""
    if not raw.startswith(_IN_PARTS):
        return raw
    name = raw.removeprefix(_IN_PARTS).decode(errors="replace")
    whole = b"".join(sets.get(name, ()))
    if hashlib.sha256(whole).hexdigest()[:16] != name:
        raise Damaged(record, f"is not read: its parts {name!r} are not all there")
    return whole


def dump_job(record: QuorumRecord) -> bytes:
    return zlib.compress(quorum_record.dump(record))


def parse_job(key: bytes, raw: bytes) -> QuorumRecord:
    try:
        return quorum_record.parse(zlib.decompress(raw))
    except (ValueError, TypeError, KeyError, zlib.error) as e:
        raise Damaged(key, f"is not read: {e!r}") from e


def dump_run(record: RunRecord) -> bytes:
    return zlib.compress(run_record.dump(record))


def parse_run(key: bytes, raw: bytes) -> RunRecord:
    try:
        return run_record.parse(zlib.decompress(raw))
    except (ValueError, TypeError, AttributeError, zlib.error) as e:
        raise Damaged(key, f"is not read: {e!r}") from e


def parse_number(key: bytes, raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError as e:
        raise Damaged(key, f"is no number: {raw[:40]!r}") from e


def check_format(key: bytes, raw: bytes) -> None:
    if (found := parse_number(key, raw)) != FORMAT:
        raise Damaged(key, f"says format {found}, and this lighthouse knows {FORMAT}: start the one that wrote it")
