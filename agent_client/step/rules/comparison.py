"""Rules that check, before each collective, that all participants of a quorum are about to run the same one.

This module does no I/O. Process groups do not check this. gloo aborts a process that receives more bytes than it
expects, and otherwise sums whatever arrives. Therefore the participants exchange *announcements* before each
collective: rows of numbers, all of the same size, that describe the collective. All buckets of a backward pass are
announced together with the first bucket. An announcement contains the step, so tensors of different steps are never
summed. The participants also announce the end of the first step under a quorum, with its number of collectives, and
then the source of their batches.

All participants receive the same rows, so all reach the same verdict:

1. Participants that hold the job's state and have already committed a step decide. If there are none, all
   participants that hold the state decide. If no participant holds the state, all participants decide.
2. The right announcement is the most frequent one among the deciding participants. A tie is resolved by the
   frequency among all participants, then by the number of steps that a deciding participant has committed since it
   joined, then by the lowest replica_rank.
3. A participant with any other announcement is at fault.

A row also carries values that may differ: flags that all participants must know before the collective, and a small
payload, which makes a separate collective unnecessary.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import NamedTuple

WORD_BYTES = 8
TEXT_WORDS = 12
NAMES_SHOWN = 8
PAYLOAD_WORDS = 3


class Kind(IntEnum):
    """Kind of an announcement (see `Announced`). NONE, a row of zeros, means that the participant announces nothing."""

    NONE = 0
    REDUCE = 1
    END = 2
    GATHER = 3
    STATE = 4
    GRADIENTS = 5
    OPTIONS = 6
    DRAW = 7
    SPEEDS = 8


class Flag(IntFlag):
    """Properties of a participant, and of the tensor that the participant is about to reduce."""

    NONE = 0
    NOT_FINITE = 1
    SKIPS_BATCH = 2
    """The participant skips its batch, contributes zeros, and does not count in this step."""


class Standing(IntEnum):
    """Authority of a participant when announcements differ. The participants with the lowest value decide."""

    TRAINED = 0
    HOLDS_STATE = 1
    HEALS = 2


def standing_of(*, heals: bool, max_step: int, has_trained: bool) -> Standing:
    """Return a participant's authority when announcements differ.

    A participant that heals has the lowest authority, unless `max_step`, the quorum's step, is 0. `has_trained` is
    True if the participant has committed a step since it joined.
    """
    if heals and max_step > 0:
        return Standing.HEALS
    return Standing.TRAINED if has_trained else Standing.HOLDS_STATE


class Announced(NamedTuple):
    """Announcement of a participant.

    REDUCE announces a collective, and END the end of the step. GATHER exchanges values between two steps. STATE and
    GRADIENTS compare digests, and OPTIONS compares options that must agree. DRAW compares the source of the batches.
    SPEEDS exchanges how long a microbatch takes.
    """

    kind: Kind
    number: int = 0
    """For REDUCE, the number of the collective in the step. For END, the number of collectives in the step. For DRAW,
    1 if the batches come from StepSampler or StepLoader, or else 0."""
    size: int = 0
    dtype: str = ""
    name: str = ""
    """Name of the tensor or value, if known."""
    step: int = 0

    def __str__(self) -> str:
        match self.kind:
            case Kind.REDUCE:
                part = f" ({self.name})" if self.name else ""
                return f"reduces {self.size} bytes of {self.dtype}{part} as collective {self.number}"
            case Kind.END:
                return f"ends the step after {self.number} collectives"
            case Kind.GATHER:
                return f"gathers values ({self.name})"
            case Kind.STATE:
                return "compares its state"
            case Kind.GRADIENTS:
                return "compares its gradients"
            case Kind.OPTIONS:
                return "compares its options"
            case Kind.SPEEDS:
                return "compares its speed"
            case Kind.DRAW:
                return f"draws from {self.dtype} {self.name}"
            case Kind.NONE:
                return "says nothing"


class Row(NamedTuple):
    standing: int
    seniority: int
    """Number of steps that this participant has committed since it joined."""
    flags: Flag
    words: tuple[int, ...]
    """The announcement, encoded for comparison."""
    payload: tuple[int, ...]

    @property
    def is_silent(self) -> bool:
        """True for a DRAW row of a rank that has not drawn a batch. Such a row matches every other announcement."""
        return self.words[0] == Kind.DRAW and not self.words[2]

    @property
    def announced(self) -> Announced:
        kind, step, number, size, _, *text = self.words
        encoded = b"".join(word.to_bytes(WORD_BYTES, "little", signed=True) for word in text).rstrip(b"\0")
        dtype, _, name = encoded.decode(errors="replace").partition(" ")
        return Announced(Kind(kind) if kind in set(Kind) else Kind.NONE, number, size, dtype, name, step)


def to_words(
    announced: Announced,
    standing: Standing,
    seniority: int = 0,
    flags: Flag = Flag.NONE,
    payload: Sequence[int] = (),
) -> tuple[int, ...]:
    """Encode an announcement as a row of numbers. Truncate long strings, because all rows have the same length.

    `standing` and `seniority` decide which announcement is right. `flags` and `payload` are values that may differ.
    """
    head = (standing, seniority, flags, announced.kind, announced.step, announced.number, announced.size)
    rest = (0,) * (PAYLOAD_WORDS - len(payload))
    return (*head, *_text_words(announced.dtype, announced.name), *payload, *rest)


@functools.lru_cache(1024)
def _text_words(dtype: str, name: str) -> tuple[int, ...]:
    text = f"{dtype} {name}".encode()
    digest = hashlib.sha256(text).digest()[:WORD_BYTES]
    padded = text[: TEXT_WORDS * WORD_BYTES].ljust(TEXT_WORDS * WORD_BYTES, b"\0")
    pieces = [digest, *(padded[at : at + WORD_BYTES] for at in range(0, len(padded), WORD_BYTES))]
    return tuple(int.from_bytes(piece, "little", signed=True) for piece in pieces)


def from_words(words: Sequence[int]) -> Row:
    standing, seniority, flags, *rest = words
    announced, payload = rest[:-PAYLOAD_WORDS], rest[-PAYLOAD_WORDS:]
    known = Flag(flags & (Flag.NOT_FINITE | Flag.SKIPS_BATCH))
    return Row(standing, seniority, known, tuple(announced), tuple(payload))


def find_faulty(rows: Sequence[Row]) -> frozenset[int]:
    announcing = [row for row in rows if not row.is_silent]
    if all(row.words == announcing[0].words for row in announcing):
        return frozenset()
    best = min(row.standing for row in announcing)
    deciding = [row for row in announcing if row.standing == best]
    among_deciding, among_all = Counter(row.words for row in deciding), Counter(row.words for row in announcing)
    right = max(deciding, key=lambda row: (among_deciding[row.words], among_all[row.words], row.seniority)).words
    return frozenset(place for place, row in enumerate(rows) if not row.is_silent and row.words != right)


def explain(rows: Sequence[Row], faulty: frozenset[int], names: Sequence[str], place: int) -> str:
    """Describe a mismatch between announcements, for the log of the participant with replica_rank `place`.

    `rows` and `names` are in the order of replica ranks. `faulty` are the replica ranks at fault. If `place` is one of
    them, only its own fault is described.
    """
    right = [other for other in range(len(rows)) if other not in faulty and not rows[other].is_silent]
    has_one_step = len({row.announced.step for row in rows}) == 1

    def announces(other: int, count: int) -> str:
        announced = rows[other].announced
        verb, _, rest = str(announced).partition(" ")
        step = "" if has_one_step else f" of step {announced.step}"
        return f"{verb[:-1] if count > 1 else verb} {rest}{step}"

    where = f"where {join_names([names[other] for other in right])} {announces(right[0], len(right))}"
    if place in faulty:
        return f"this group ({names[place]}) {announces(place, 1)} {where}"
    parties: dict[tuple[int, ...], list[int]] = {}
    for other in sorted(faulty):
        parties.setdefault(rows[other].words, []).append(other)
    texts = [
        f"{join_names([names[other] for other in each])} {announces(each[0], len(each))}" for each in parties.values()
    ]
    return f"{'; '.join(texts)}, {where}"


def join_names(names: Sequence[str]) -> str:
    """Format names, at most NAMES_SHOWN of them, as "a, b and c"."""
    more = len(names) - NAMES_SHOWN
    *others, last = (*names[:NAMES_SHOWN], f"{more} more") if more > 0 else names
    return f"{', '.join(others)} and {last}" if others else last


class DataChoice(NamedTuple):
    """Settings of the sampler. If they differed between groups, some samples would be used twice or not at all."""

    length: int
    batch_size: int
    accumulate: int
    """Number of batches per microbatch."""
    seed: int

    def __str__(self) -> str:
        accumulated = f" x {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.length} samples, in batches of {self.batch_size}{accumulated}, in the order of seed {self.seed}"


def announce_draw(choice: DataChoice | None) -> Announced:
    if choice is None:
        return Announced(Kind.DRAW)
    length, _, rest = str(choice).partition(" ")
    return Announced(Kind.DRAW, 1, dtype=length, name=rest)


@dataclass(slots=True)
class DataUses:
    """Checks that a rank draws the batches of each committed step in that step, and under its quorum."""

    choice: DataChoice | None = None
    irregular: int = 0
    """Number of committed steps whose batches were drawn under an earlier quorum, or not drawn at all."""
    has_changed: bool = False
    _drawn: tuple[int, int] = (-1, -1)

    def drawn(self, choice: DataChoice, step: int, quorum_id: int) -> None:
        self.has_changed |= self.choice not in (None, choice)
        self.choice, self._drawn = choice, (step, quorum_id)

    def count_commit(self, step: int, quorum_id: int) -> None:
        """Record a committed step in which this rank's batches counted."""
        if self.choice is not None and self._drawn != (step, quorum_id):
            self.irregular += 1

    def summary(self, rank_batches: int) -> dict[str, int | bool]:
        """Return the dict that `Agent.data_report` describes, or an empty dict before the first batch.

        `rank_batches` is the number of microbatches in all committed steps, summed over all ranks.
        """
        if self.choice is None:
            return {}
        samples = rank_batches * self.choice.accumulate * self.choice.batch_size
        epoch, position = divmod(samples, self.choice.length)
        return {
            **self.choice._asdict(),
            "samples": samples,
            "epoch": epoch,
            "position": position,
            "irregular_steps": self.irregular,
            "is_exact": not self.irregular and not self.has_changed,
        }


# -- digests of states: the digest that most participants send is right. If several digests are equally frequent, the
# digest of the participant with the lowest replica_rank is right. Participants that heal, catch up or hold no complete
# state send None, and their states are not compared. All participants compare in the same steps, even if their options
# differ, because a missing collective would make the step fail.

Digest = tuple[int, int]
MAX_DIVERGENCES = 3
"""Number of times a group may differ, with no full round of equal comparisons in between, before it must exit."""


def common_interval(intervals: Sequence[int]) -> int:
    """Return the largest of the participants' comparison intervals, in steps, or 0 if any of them is 0."""
    return max(intervals) if all(every > 0 for every in intervals) else 0


def differs(own: Digest, digests: Sequence[Digest | None]) -> bool:
    """Return whether `own`, which `digests` need not contain, differs from the most frequent digest in `digests`."""
    wrong = outliers(digests)
    right = next((digest for place, digest in enumerate(digests) if digest is not None and place not in wrong), own)
    return own != right


def outliers(digests: Sequence[Digest | None]) -> tuple[int, ...]:
    sets: dict[Digest, list[int]] = {}
    for place, digest in enumerate(digests):
        if digest is not None:
            sets.setdefault(digest, []).append(place)
    if len(sets) < 2:
        return ()
    right = max(sets.values(), key=lambda places: (len(places), -places[0]))
    return tuple(place for place, digest in enumerate(digests) if digest is not None and place not in right)


@dataclass(slots=True)
class Divergences:
    """Counts how many times each participant's state has differed since the last full round of equal comparisons."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    _equal: int = 0

    def compared(self, wrong: Sequence[str], windows: int) -> int:
        """Record a comparison in which the participants `wrong`, if any, differed. Return their highest count, or 0.

        A full round has `windows` comparisons.
        """
        if not wrong:
            self._equal += 1
            if self._equal >= windows:
                self.counts.clear()
            return 0
        self._equal = 0
        for name in wrong:
            self.counts[name] = self.counts.get(name, 0) + 1
        return max(self.counts[name] for name in wrong)
