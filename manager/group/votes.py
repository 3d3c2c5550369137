"""The group's decision on a step: commit or discard. No I/O.

An attempt is a pair (quorum_id, step). It commits when all ranks of the group have voted yes, and one no discards it at
once. A yes that names its quorum is bound: it counts even after its call has ended, and its rank repeats it until it
receives the decision. A yes without a quorum ends with its call, and the rank may vote again.

A late or repeated vote receives the decision, except that a no is never answered with a commit. A vote for another step
than the present one is refused with both numbers. When the ranks receive a quorum for a step, a new attempt begins, so
an earlier discard does not affect the retry. Callers of the bare RPC without a quorum open an attempt by their first
vote.

A bound vote for an attempt that this manager has not opened comes from the time of an earlier manager, which may have
sent its decision to some ranks. No rank may receive a different one, so the attempt is inherited:

1. It was committed if a rank holds the tag (step + 1, quorum_id), would hold it but for a torn state, or votes on
   step + 1 of the same quorum.
2. It was discarded if a rank votes no, or requests the step again after a failure. Any other request shows that the
   rank holds no committed result. Once every rank has either repeated its yes or shown this, no rank has received a
   commit, and the step is discarded.
3. If a rank is lost and given up before it shows any of this, the decision cannot be determined. The waiting votes are
   refused, and their ranks end.
"""

from collections import OrderedDict
from dataclasses import dataclass

from lighthouse_protocol.constraints import check_count
from lighthouse_protocol.messages.membership import Decision, Tag
from lighthouse_protocol.refusals import LighthouseError, Superseded, Unrecoverable, WrongState
from manager.group import events
from manager.group.records import PendingVote, QuorumRequest, ReplicaGroup
from manager.group.requests import check_rank

DECISIONS_KEPT = 16


@dataclass(frozen=True, slots=True)
class StepDecided:
    """Decision on a step. It precedes the answers to the votes."""

    quorum_id: int
    step: int
    commit: bool


Effect = StepDecided | events.VoteAnswered | events.CallRefused


@dataclass(slots=True)
class _Attempt:
    """An attempt at a step. The votes are in the records of the ranks."""

    quorum_id: int
    step: int

    is_opened: bool
    """A quorum has opened the attempt, not a vote."""

    decision: bool | None = None

    is_bound: bool = False
    """A vote has named its quorum."""

    @property
    def is_inherited(self) -> bool:
        """Return whether an earlier manager may have decided the attempt."""
        return not self.is_opened and self.is_bound and self.decision is None

    @property
    def key(self) -> tuple[int, int]:
        return self.quorum_id, self.step


class CommitMachine:
    """State machine of a group's votes. It has no timeouts; a waiting vote ends with its call."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._attempt: _Attempt | None = None
        self._decided: OrderedDict[tuple[int, int], bool] = OrderedDict()

    @property
    def votes(self) -> list[PendingVote]:
        """The waiting votes in order of arrival."""
        return sorted((rank.vote for rank in self._group.ranks if rank.vote is not None), key=lambda vote: vote.call)

    @property
    def voters(self) -> tuple[int, ...]:
        """The ranks with a waiting vote."""
        return tuple(vote.group_rank for vote in self.votes)

    @property
    def is_voting(self) -> bool:
        return any(rank.vote is not None for rank in self._group.ranks)

    def open(self, quorum_id: int, step: int) -> list[Effect]:
        """Begin the attempt at `step` for which the ranks receive the quorum."""
        return self._open(_Attempt(quorum_id, step, is_opened=True))

    def withdraw(self, call: int) -> None:
        """Remove the vote of an ended call, unless the vote is bound."""
        for rank in self._group.ranks:
            if rank.vote is not None and rank.vote.call == call and not rank.vote.is_bound:
                rank.vote = None

    def lose(self, group_rank: int) -> list[Effect]:
        """Discard the step if the lost rank has not voted, unless an earlier manager may have decided it."""
        attempt = self._attempt
        if attempt is None or attempt.decision is not None or attempt.is_inherited:
            return []
        return self._decide(attempt, False) if self._group.ranks[group_rank].vote is None else []

    def note_request(self, request: QuorumRequest, *, has_quorum: bool = True) -> list[Effect]:
        """Decide the step if a rank's request for a quorum shows the decision, or rules out its vote.

        The bound yes of another rank may wait for a vote of this rank, which never comes.

        Args:
            request: The rank's request.
            has_quorum: Whether the group holds a standing quorum, so that a request for the open step may still lead to
                a vote.
        """
        attempt, rank = self._attempt, self._group.ranks[request.group_rank]
        if attempt is None or attempt.decision is not None or not attempt.is_bound or rank.vote is not None:
            return []
        torn = Tag(request.distrust.step, request.distrust.quorum_id) if request.distrust is not None else None
        if (attempt.step + 1, attempt.quorum_id) in ((request.step, request.tag_quorum_id), torn):
            return self._decide(attempt, True)
        if request.step == attempt.step and request.commit_failures > 0:
            return self._decide(attempt, False)
        if attempt.is_opened:
            is_let_in = has_quorum and request.step == attempt.step
            return [] if is_let_in else self._decide(attempt, False)
        return self._note_without_step(attempt, request.group_rank)

    def miss(self, group_rank: int, reason: str) -> list[Effect]:
        """Refuse the votes on an inherited attempt if only this lost rank may have known the decision."""
        attempt, rank = self._attempt, self._group.ranks[group_rank]
        if attempt is None or not attempt.is_inherited or rank.is_without_step or rank.vote is not None:
            return []
        error = Unrecoverable(
            f"step: what was decided on step {attempt.step} of quorum {attempt.quorum_id} is not to be learned: this "
            f"manager has started since, and {reason}"
        )
        return self._refuse_all(error)

    def vote(self, vote: PendingVote) -> list[Effect]:
        """Count a vote. Answer all waiting votes if it decides the step."""
        try:
            check_rank(vote.group_rank, self._group.size)
            check_count(vote.step, "step")
            effects = self._infer(vote)
            attempt = self._find(vote)
        except LighthouseError as e:
            return [events.CallRefused(vote.call, e)]
        if isinstance(attempt, bool):
            return [*effects, _answer(vote, attempt and vote.vote)]
        if attempt.decision is not None:
            self._group.ranks[vote.group_rank].knows_decision = True
            return [*effects, _answer(vote, attempt.decision and vote.vote)]
        if attempt.is_inherited and vote.quorum_id is None and not vote.vote:
            # The rank has received no quorum from this manager, so it is in no attempt.
            return [_answer(vote, False), *self._note_without_step(attempt, vote.group_rank)]
        return effects + self._count(attempt, vote)

    def _note_without_step(self, attempt: _Attempt, group_rank: int) -> list[Effect]:
        # The rank's process may be new, so another rank may still hold the step.
        self._group.ranks[group_rank].is_without_step = True
        return self._decide_if_complete(attempt)

    def _decide_if_complete(self, attempt: _Attempt) -> list[Effect]:
        ranks = self._group.ranks
        if all(rank.vote is not None for rank in ranks):
            return self._decide(attempt, True)
        is_complete = all(rank.vote is not None or rank.is_without_step for rank in ranks)
        return self._decide(attempt, False) if is_complete else []

    def _open(self, attempt: _Attempt) -> list[Effect]:
        """Replace the present attempt. If it has no decision, refuse its waiting votes."""
        old = self._attempt
        self._decided.pop(attempt.key, None)
        effects: list[Effect] = []
        if old is not None and old.decision is None:
            effects += self._refuse_all(
                WrongState(f"step: the attempt at step {old.step} was given up for a quorum for step {attempt.step}")
            )
        self._begin(attempt)
        return effects

    def _begin(self, attempt: _Attempt) -> None:
        self._attempt = attempt
        for rank in self._group.ranks:
            rank.vote, rank.knows_decision, rank.is_without_step = None, False, False

    def _infer(self, vote: PendingVote) -> list[Effect]:
        """Infer the decision on an earlier step from a vote for a later one of the same quorum.

        A rank enters a step only after all ranks have committed the previous one.
        """
        attempt = self._attempt
        if attempt is None or attempt.is_opened or not attempt.is_bound or vote.quorum_id != attempt.quorum_id:
            return []
        if vote.step < attempt.step:
            self._decided.setdefault((attempt.quorum_id, vote.step), True)
        is_over = vote.step == attempt.step + 1 and attempt.decision is None
        return self._decide(attempt, True) if is_over else []

    def _find(self, vote: PendingVote) -> _Attempt | bool:
        """Return the attempt of a vote, or the decision on it if it has ended.

        Raises:
            WrongState: The vote is for another step or quorum than the present attempt.
        """
        attempt = self._attempt
        quorum_id = vote.quorum_id if vote.quorum_id is not None else attempt.quorum_id if attempt else 0
        key = (quorum_id, vote.step)
        if attempt is not None and key == attempt.key:
            return self._reopened(attempt) if vote.quorum_id is None and self._is_over(attempt) else attempt
        if key in self._decided:
            return self._decided[key]
        if attempt is not None and quorum_id != attempt.quorum_id and (attempt.is_opened or self.is_voting):
            raise WrongState(f"quorum_id: the vote is for quorum {quorum_id}, the one in force is {attempt.quorum_id}")
        if attempt is not None and attempt.decision is None and (attempt.is_opened or self.is_voting):
            raise WrongState(f"step: the vote is for step {vote.step}, the step in flight is {attempt.step}")
        is_of_it = attempt is not None and vote.quorum_id == attempt.quorum_id
        if attempt is not None and attempt.decision is not None and is_of_it and vote.step < attempt.step:
            raise WrongState(f"step: the vote is for step {vote.step}, and step {attempt.step} is decided")
        opened = _Attempt(quorum_id, vote.step, is_opened=False)
        self._begin(opened)
        return opened

    def _is_over(self, attempt: _Attempt) -> bool:
        """Return whether all ranks have received a discard, so that the next vote is for the retry."""
        return attempt.decision is False and all(rank.knows_decision for rank in self._group.ranks)

    def _reopened(self, attempt: _Attempt) -> _Attempt:
        self._decided.pop(attempt.key, None)
        again = _Attempt(attempt.quorum_id, attempt.step, is_opened=attempt.is_opened)
        self._begin(again)
        return again

    def _count(self, attempt: _Attempt, vote: PendingVote) -> list[Effect]:
        rank = self._group.ranks[vote.group_rank]
        effects: list[Effect] = []
        if rank.vote is not None:
            error = Superseded(f"rank {vote.group_rank} has voted again")
            effects.append(events.CallRefused(rank.vote.call, error))
        rank.vote = vote
        attempt.is_bound |= vote.is_bound
        if not vote.vote:
            return effects + self._decide(attempt, False)
        rank.is_without_step = False
        return effects + self._decide_if_complete(attempt)

    def _decide(self, attempt: _Attempt, commit: bool) -> list[Effect]:
        attempt.decision = commit
        answers = [_answer(vote, commit) for vote in self.votes]
        for rank in self._group.ranks:
            rank.knows_decision, rank.vote = rank.vote is not None, None
        self._decided[attempt.key] = commit
        while len(self._decided) > DECISIONS_KEPT:
            self._decided.popitem(last=False)
        return [StepDecided(attempt.quorum_id, attempt.step, commit), *answers]

    def _refuse_all(self, error: LighthouseError) -> list[Effect]:
        votes = self.votes
        for rank in self._group.ranks:
            rank.vote = None
        return [events.CallRefused(vote.call, error) for vote in votes]


def _answer(vote: PendingVote, commit: bool) -> events.VoteAnswered:
    return events.VoteAnswered(vote.call, Decision(commit), vote.group_rank)
