"""One round of evidence: which managers to ask, what has come, what is missing. No I/O.

The lighthouse asks MAX_ASKED replica groups at most, those under suspicion first, and keeps MAX_BYTES at most, so that
a large job's evidence fits its memory and one message.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lighthouse_protocol.messages.evidence import RankEvidence
from lighthouse_protocol.messages.incident import Gathered, MemberEvidence
from lighthouse_protocol.refusals import InvalidRequest, UnknownName
from lighthouse_protocol.rules.rank_text import MAX_LISTED

MAX_ASKED = 64
MAX_BYTES = 24 * 1024 * 1024
WITHIN_S = 10.0

Asked: TypeAlias = int | str
"""The number of a manager's session; the name of a run."""


@dataclass(frozen=True, slots=True)
class EvidenceTarget:
    """A member, or a run, that may be asked. `session` None: it holds none."""

    replica_id: str
    session: Asked | None


@dataclass(frozen=True, slots=True)
class Question:
    session: Asked
    replica_id: str
    group_ranks: tuple[int, ...] = ()


class EvidenceRound:
    """`ranks`: of which replica groups which ranks, empty: all of the group; None: every target."""

    def __init__(
        self,
        targets: Iterable[EvidenceTarget],
        *,
        ranks: Mapping[str, tuple[int, ...]] | None = None,
        suspects: Sequence[str] = (),
    ) -> None:
        self._evidence: list[MemberEvidence] = []
        self._missing: list[str] = []
        self._bytes = 0
        here = {target.replica_id: target for target in targets}
        first = {name.rpartition("/")[0] or name for name in suspects}
        wanted = sorted(here if ranks is None else ranks, key=lambda name: (name not in first, name))
        able = [name for name in wanted if self._is_able(name, here.get(name))]
        self._leave_out(able[MAX_ASKED:])
        self.questions = tuple(
            Question(here[name].session or 0, name, (ranks or {}).get(name, ())) for name in able[:MAX_ASKED]
        )
        self._waiting = {question.session: question for question in self.questions}

    @property
    def is_complete(self) -> bool:
        return not self._waiting

    def took(self, session: Asked, rank: RankEvidence) -> None:
        question = self._waiting.get(session)
        if question is None:
            return
        self._bytes += size_of(rank)
        if self._bytes > MAX_BYTES:
            rank = without_text(rank, f"left out: there is more than {MAX_BYTES >> 20} MiB of evidence")
        self._evidence.append(MemberEvidence(question.replica_id, rank))

    def done(self, session: Asked) -> None:
        self._waiting.pop(session, None)

    def ended(self, session: Asked) -> None:
        """The session, before all has come."""
        if (question := self._waiting.pop(session, None)) is not None:
            self._missing.append(f"{question.replica_id}: its session has ended")

    def result(self) -> Gathered:
        """What has come by now, naming the ranks that are missing."""
        late = [f"{question.replica_id}: not all came within {WITHIN_S:g} s" for question in self._waiting.values()]
        evidence = sorted(self._evidence, key=lambda one: (one.replica_id, one.rank.group_rank))
        return Gathered(tuple(evidence), (*self._missing, *late))

    def _is_able(self, name: str, target: EvidenceTarget | None) -> bool:
        if target is None or target.session is None:
            self._missing.append(f"{name}: it holds no session with the lighthouse")
            return False
        return True

    def _leave_out(self, names: Sequence[str]) -> None:
        if names:
            shown, more = names[:MAX_LISTED], len(names) - MAX_LISTED
            and_more = f" and {more} more" if more > 0 else ""
            self._missing.append(f"{', '.join(shown)}{and_more}: at most {MAX_ASKED} replica groups are asked")


def size_of(rank: RankEvidence) -> int:
    return sum(map(len, (rank.stacks, rank.flight_recorder, rank.process, *rank.output, *rank.missing)))


def without_text(rank: RankEvidence, why: str) -> RankEvidence:
    return replace(rank, stacks="", flight_recorder="", process="", output=(), missing=(why,))


def read_ranks(names: Iterable[str]) -> dict[str, tuple[int, ...]] | None:
    """What a person has typed: b/1 is a rank, b all of a replica group. None: nothing. Raises InvalidRequest."""
    chosen: dict[str, set[int]] = {}
    for name in names:
        group, slash, number = name.rpartition("/")
        if not slash:
            chosen[name] = set()
        elif not number.isdecimal() or len(number) > 5:
            raise InvalidRequest(f"{name!r} is not a rank; write b/1, or b for all of that group", field="rank")
        elif chosen.setdefault(group, {int(number)}):  # else all of it are asked for already
            chosen[group].add(int(number))
    return {group: tuple(sorted(ranks)) for group, ranks in chosen.items()} or None


def check_ranks(replica_id: str, ranks: Sequence[int], group_world_size: int) -> None:
    """Raises UnknownName for a rank that the group does not have. `group_world_size` 0: it has not said how many."""
    unknown = [rank for rank in ranks if rank >= group_world_size > 0]
    if unknown:
        last = group_world_size - 1
        has = f"ranks {replica_id}/0 to {replica_id}/{last}" if last else f"rank {replica_id}/0 only"
        raise UnknownName(f"rank: there is no {replica_id}/{unknown[0]}; this group has {has}")
