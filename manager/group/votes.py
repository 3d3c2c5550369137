"""The votes for a step -> commit or discard.

An attempt is (quorum_id, step). It commits when every rank of the group has voted yes; one no discards it at once. A
yes that names its quorum is bound: it counts also when its call is over, and its rank repeats it until it has the
decision. A yes that names none lives as long as its call: a rank that withdraws has not voted, and may vote again. A
late or repeated voter gets the decision that was made; but a rank that votes no is never told to commit. A vote for
another step than the one in flight is refused with both numbers. A quorum answered for a step opens a new attempt at
it, so a discard does not stick to the retry.

Callers of the bare RPC that ask for no quorum open an attempt by their first vote.

A bound vote for an attempt that was not opened here is of a manager that has ended, and that may have told others what
it decided. So no rank that lives may be told otherwise:

1. It was committed, if a rank holds (step + 1, quorum_id), would if it had not torn its state, or was let into
   step + 1 of the same quorum.
2. It was not, if a rank says no to it, or has failed at its step. One that asks for anything else is not bound, and
   holds no such state: once every rank has either repeated its yes or shown that, none was told to commit.
3. Where a rank has gone for good before it said any of that, what it knew is not to be learned: those that wait are
   refused, and end.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from lighthouse_protocol.constraints import check_count
from lighthouse_protocol.messages.membership import Assignment, Tag
from lighthouse_protocol.refusals import LighthouseError, Superseded, Unrecoverable, WrongState
from manager.group.requests import check_rank

DECISIONS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Opened:
    """Every rank was answered quorum `quorum_id` for `step`."""

    quorum_id: int
    step: int


@dataclass(frozen=True, slots=True)
class Voted:
    """`quorum_id` None: the one last answered. `wants_next`: the rank can use a grant that comes with the decision."""

    call: int
    group_rank: int
    step: int
    vote: bool
    quorum_id: int | None = None
    wants_next: bool = False


@dataclass(frozen=True, slots=True)
class Withdrawn:
    call: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """It will not vote any more: what was opened here, and it has not voted for, is discarded."""

    group_rank: int


@dataclass(frozen=True, slots=True)
class RankMissed:
    """It was lost, for that reason, and no process has come in its place."""

    group_rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A rank asks for the quorum of `step`: it will not vote for an earlier one any more. `stands`: it may be let into
    the step that was opened; else it waits for another quorum, and will not vote for that one either. `torn`: the state
    that it would hold."""

    group_rank: int
    step: int
    tag_quorum_id: int | None
    has_failed: bool
    stands: bool = True
    torn: Tag | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """The answer to one vote. `next`: the rank is let into the next step by it."""

    call: int
    commit: bool
    group_rank: int = field(default=-1, compare=False)
    next: Assignment | None = None


@dataclass(frozen=True, slots=True)
class StepDecided:
    """For all ranks. It comes before their answers."""

    quorum_id: int
    step: int
    commit: bool


@dataclass(frozen=True, slots=True)
class VoteRefused:
    call: int
    error: LighthouseError


Event = Opened | Voted | Withdrawn | RankLost | RankMissed | Asked
Effect = StepDecided | Decided | VoteRefused


@dataclass(slots=True)
class _Attempt:
    quorum_id: int
    step: int
    is_opened: bool  # by a quorum, not by a vote
    yes: dict[int, int] = field(default_factory=dict)  # group_rank -> call
    decision: bool | None = None
    told: set[int] = field(default_factory=set)
    bound: set[int] = field(default_factory=set)  # calls
    empty: set[int] = field(default_factory=set)  # ranks that ask, and neither hold the step nor have voted for it

    @property
    def is_inherited(self) -> bool:
        """An earlier manager may have decided it."""
        return not self.is_opened and bool(self.bound) and self.decision is None

    @property
    def key(self) -> tuple[int, int]:
        return self.quorum_id, self.step


class CommitMachine:
    """No time passes here: a waiting vote ends with its call."""

    def __init__(self, group_world_size: int) -> None:
        self._size = group_world_size
        self._attempt: _Attempt | None = None
        self._decided: OrderedDict[tuple[int, int], bool] = OrderedDict()

    @property
    def voters(self) -> tuple[int, ...]:
        """The ranks whose votes wait."""
        return tuple(self._attempt.yes) if self._attempt is not None else ()

    @property
    def is_voting(self) -> bool:
        return self._attempt is not None and bool(self._attempt.yes)

    def handle(self, event: Event) -> Sequence[Effect]:
        match event:
            case Opened(quorum_id, step):
                return self._open(_Attempt(quorum_id, step, is_opened=True))
            case Voted():
                return self._vote(event)
            case Withdrawn(call):
                self._withdraw(call)
                return []
            case Asked():
                return self._note_ask(event)
            case RankLost(group_rank):
                attempt = self._attempt
                if attempt is None or attempt.decision is not None or attempt.is_inherited:
                    return []
                return self._decide(attempt, False) if group_rank not in attempt.yes else []
            case RankMissed():
                return self._miss(event)

    def _note_ask(self, asked: Asked) -> list[Effect]:
        """The bound yes of another rank may wait for this one's, under a manager that has restarted: what it holds
        tells what was decided."""
        attempt = self._attempt
        if attempt is None or attempt.decision is not None or not attempt.bound or asked.group_rank in attempt.yes:
            return []
        if (attempt.step + 1, attempt.quorum_id) in ((asked.step, asked.tag_quorum_id), asked.torn):
            return self._decide(attempt, True)
        if asked.step == attempt.step and asked.has_failed:
            return self._decide(attempt, False)
        if attempt.is_opened:
            is_let_in = asked.stands and asked.step == attempt.step
            return [] if is_let_in else self._decide(attempt, False)
        return self._note_empty(attempt, asked.group_rank)

    def _note_empty(self, attempt: _Attempt, group_rank: int) -> list[Effect]:
        """Its process may be new: another rank may still hold the step."""
        attempt.empty.add(group_rank)
        return self._look(attempt)

    def _look(self, attempt: _Attempt) -> list[Effect]:
        """Whether every rank has spoken."""
        if len(attempt.yes) == self._size:
            return self._decide(attempt, True)
        return self._decide(attempt, False) if len(attempt.empty | attempt.yes.keys()) == self._size else []

    def _miss(self, missed: RankMissed) -> list[Effect]:
        attempt = self._attempt
        if attempt is None or not attempt.is_inherited or missed.group_rank in attempt.empty | attempt.yes.keys():
            return []
        error = Unrecoverable(
            f"step: what was decided on step {attempt.step} of quorum {attempt.quorum_id} is not to be learned: this "
            f"manager has started since, and {missed.reason}"
        )
        calls, attempt.yes = attempt.yes.values(), {}
        return [VoteRefused(call, error) for call in calls]

    def _open(self, attempt: _Attempt) -> list[Effect]:
        """An attempt that was not decided is over; the votes that wait in it are refused."""
        old, self._attempt = self._attempt, attempt
        self._decided.pop(attempt.key, None)
        if old is None or old.decision is not None:
            return []
        error = WrongState(f"step: the attempt at step {old.step} was given up for a quorum for step {attempt.step}")
        return [VoteRefused(call, error) for call in old.yes.values()]

    def _vote(self, voted: Voted) -> list[Effect]:
        try:
            check_rank(voted.group_rank, self._size)
            check_count(voted.step, "step")
            effects = self._infer(voted)
            attempt = self._find(voted)
        except LighthouseError as e:
            return [VoteRefused(voted.call, e)]
        if isinstance(attempt, bool):
            return [*effects, Decided(voted.call, attempt and voted.vote, voted.group_rank)]
        if attempt.decision is not None:
            attempt.told.add(voted.group_rank)
            return [*effects, Decided(voted.call, attempt.decision and voted.vote, voted.group_rank)]
        if attempt.is_inherited and voted.quorum_id is None and not voted.vote:
            answer = Decided(voted.call, False, voted.group_rank)  # it was answered none, and is in no attempt
            return [answer, *self._note_empty(attempt, voted.group_rank)]
        return effects + self._count(attempt, voted)

    def _infer(self, voted: Voted) -> list[Effect]:
        """A rank is let into a step of a quorum once all ranks have committed the one before it: of two votes that
        ranks repeat, the later one tells what was decided on the earlier."""
        attempt = self._attempt
        if attempt is None or attempt.is_opened or not attempt.bound or voted.quorum_id != attempt.quorum_id:
            return []
        if voted.step < attempt.step:
            self._decided.setdefault((attempt.quorum_id, voted.step), True)
        is_over = voted.step == attempt.step + 1 and attempt.decision is None
        return self._decide(attempt, True) if is_over else []

    def _find(self, voted: Voted) -> _Attempt | bool:
        """The attempt that is voted for, or the decision that was made on it. Raises a refusal."""
        attempt = self._attempt
        quorum_id = voted.quorum_id if voted.quorum_id is not None else attempt.quorum_id if attempt else 0
        key = (quorum_id, voted.step)
        if attempt is not None and key == attempt.key:
            return self._reopened(attempt) if voted.quorum_id is None and self._is_over(attempt) else attempt
        if key in self._decided:
            return self._decided[key]
        if attempt is not None and quorum_id != attempt.quorum_id and (attempt.is_opened or attempt.yes):
            raise WrongState(f"quorum_id: the vote is for quorum {quorum_id}, the one in force is {attempt.quorum_id}")
        if attempt is not None and attempt.decision is None and (attempt.is_opened or attempt.yes):
            raise WrongState(f"step: the vote is for step {voted.step}, the step in flight is {attempt.step}")
        is_of_it = attempt is not None and voted.quorum_id == attempt.quorum_id
        if attempt is not None and attempt.decision is not None and is_of_it and voted.step < attempt.step:
            raise WrongState(f"step: the vote is for step {voted.step}, and step {attempt.step} is decided")
        self._attempt = _Attempt(quorum_id, voted.step, is_opened=False)
        return self._attempt

    def _is_over(self, attempt: _Attempt) -> bool:
        """A discard that every rank was told of: the next vote is about the next try. A commit stands for ever."""
        return attempt.decision is False and len(attempt.told) == self._size

    def _reopened(self, attempt: _Attempt) -> _Attempt:
        self._decided.pop(attempt.key, None)
        self._attempt = _Attempt(attempt.quorum_id, attempt.step, is_opened=attempt.is_opened)
        return self._attempt

    def _count(self, attempt: _Attempt, voted: Voted) -> list[Effect]:
        effects: list[Effect] = []
        older = attempt.yes.pop(voted.group_rank, None)
        if older is not None:
            effects.append(VoteRefused(older, Superseded(f"rank {voted.group_rank} has voted again")))
        attempt.yes[voted.group_rank] = voted.call
        if voted.quorum_id is not None:
            attempt.bound.add(voted.call)
        if not voted.vote:
            return effects + self._decide(attempt, False)
        attempt.empty.discard(voted.group_rank)
        return effects + self._look(attempt)

    def _decide(self, attempt: _Attempt, commit: bool) -> list[Effect]:
        attempt.decision = commit
        attempt.told = set(attempt.yes)
        answers = [Decided(call, commit, rank) for rank, call in attempt.yes.items()]
        attempt.yes = {}
        self._decided[attempt.key] = commit
        while len(self._decided) > DECISIONS_KEPT:
            self._decided.popitem(last=False)
        return [StepDecided(attempt.quorum_id, attempt.step, commit), *answers]

    def _withdraw(self, call: int) -> None:
        attempt = self._attempt
        if attempt is not None and call not in attempt.bound:
            attempt.yes = {rank: other for rank, other in attempt.yes.items() if other != call}
