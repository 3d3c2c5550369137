"""The group's decision on a step: commit or discard. This module does no I/O.

An *attempt* is one execution of a step, identified by (quorum_id, step). It commits when all ranks in the group have
voted yes. A single no discards it immediately. A yes that names its quorum is *bound*: it counts even after its call
has ended, and its rank repeats it until it receives the decision. A yes without a quorum ends with its call, and the
rank may vote again.

A late or repeated vote receives the decision, except that a no is never answered with a commit. A vote for another step
than the current one is refused, and the error names both steps. When the ranks receive a quorum for a step, a new
attempt begins, so an earlier discard does not affect the retry. Clients of the bare RPC that request no quorum open an
attempt with their first vote.

A bound vote may be for an attempt that this manager has not opened. An earlier manager opened it, and may have sent its
decision to some ranks. No rank may receive a different decision, so the attempt is *inherited*, and the ranks' messages
show how it was decided:

1. It was committed if a rank holds the state tagged (step + 1, quorum_id), applied that commit only in part, or votes
   on step + 1 of the same quorum.
2. It was discarded if a rank votes no, or requests the step again after a failure. Any other request shows that the
   rank holds no committed result. Once every rank has either repeated its yes or shown this, no rank can have received
   a commit, and the step is discarded.
3. If a rank is lost and given up before it shows any of this, the decision cannot be determined. The waiting votes are
   refused, and their ranks exit.
"""

from lighthouse_protocol.constraints import check_count
from lighthouse_protocol.messages.membership import Decision, Tag
from lighthouse_protocol.messages.session import VoteAnswer
from lighthouse_protocol.refusals import LighthouseError, Superseded, Unrecoverable, WrongState
from manager.group.events import PendingVote, QuorumRequest
from manager.group.records import Attempt, ReplicaGroup

DECISIONS_KEPT = 16


class Votes:
    """Applies the rules about the ranks' votes. It sets no timeouts: a vote without a quorum waits until its call ends.

    Methods that return `bool | None` return the decision on the current attempt if it follows from their input, or None
    if the attempt is still undecided. If such a method returns a decision, the caller must call `decide`.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group

    @property
    def waiting(self) -> list[PendingVote]:
        """The waiting votes in order of arrival."""
        return sorted([rank.vote for rank in self._group.ranks if rank.vote is not None], key=lambda vote: vote.call)

    @property
    def is_voting(self) -> bool:
        return any(rank.vote is not None for rank in self._group.ranks)

    def open(self, quorum_id: int, step: int) -> None:
        """Begin a new attempt at `step`. Call this when the ranks receive a quorum or a grant for that step.

        If the previous attempt is undecided, refuse its waiting votes.
        """
        old = self._group.attempt
        self._group.decided.pop((quorum_id, step), None)
        if old is not None and old.decision is None:
            self._refuse_all(
                WrongState(f"step: the attempt at step {old.step} was abandoned for a quorum for step {step}")
            )
        self._begin_attempt(Attempt(quorum_id, step, is_opened=True))

    def withdraw(self, call: int) -> None:
        """Remove the vote that arrived with a call that has ended, unless the vote names its quorum."""
        for rank in self._group.ranks:
            if rank.vote is not None and rank.vote.call == call and not rank.vote.is_bound:
                rank.vote = None

    def note_loss(self, group_rank: int) -> bool | None:
        """Decide to discard the step if the lost rank has not voted, unless an earlier manager may have decided it."""
        attempt = self._group.attempt
        if attempt is None or attempt.decision is not None or attempt.is_inherited:
            return None
        return False if self._group.ranks[group_rank].vote is None else None

    def note_request(self, request: QuorumRequest) -> bool | None:
        """Decide the step if a rank's request for a quorum reveals the decision, or shows that the rank will not vote.

        Otherwise, another rank's yes that names its quorum could wait forever for this rank's vote.
        """
        attempt, rank = self._group.attempt, self._group.ranks[request.group_rank]
        if attempt is None or attempt.decision is not None or not attempt.is_bound or rank.vote is not None:
            return None
        torn = Tag(request.distrust.step, request.distrust.quorum_id) if request.distrust is not None else None
        if (attempt.step + 1, attempt.quorum_id) in ((request.step, request.tag_quorum_id), torn):
            return True
        if request.step == attempt.step and request.commit_failures > 0:
            return False
        if attempt.is_opened:
            # Under a standing quorum, a request for the open step may still lead to a vote.
            may_vote = self._group.standing is not None and request.step == attempt.step
            return None if may_vote else False
        return self._note_without_step(request.group_rank)

    def give_up_rank(self, group_rank: int, reason: str) -> None:
        """Refuse the waiting votes if the lost rank may have received a decision on the step from an earlier manager.

        This manager cannot determine that decision, and the other ranks must not receive a different decision.
        """
        attempt, rank = self._group.attempt, self._group.ranks[group_rank]
        if attempt is None or not attempt.is_inherited or rank.is_without_step or rank.vote is not None:
            return
        self._refuse_all(
            Unrecoverable(
                f"step: the decision on step {attempt.step} of quorum {attempt.quorum_id} is unknown: "
                f"this manager has started since then, and {reason}"
            )
        )

    def infer_decision(self, vote: PendingVote) -> bool | None:
        """Infer from a vote that the earlier steps of its quorum were committed.

        A rank enters a step only after all ranks have committed the previous one.
        """
        attempt = self._group.attempt
        if attempt is None or attempt.is_opened or not attempt.is_bound or vote.quorum_id != attempt.quorum_id:
            return None
        if 0 <= vote.step < attempt.step:
            self._group.decided.setdefault((attempt.quorum_id, vote.step), True)
        return True if vote.step == attempt.step + 1 and attempt.decision is None else None

    def count_vote(self, vote: PendingVote) -> bool | None:
        """Record a vote, or answer it if its step is already decided."""
        try:
            check_count(vote.step, "step")
            attempt = self._find(vote)
        except LighthouseError as e:
            self._group.refuse(vote.call, e)
            return None
        rank = self._group.ranks[vote.group_rank]
        if isinstance(attempt, bool):
            return self._answer(vote, attempt and vote.vote)
        if attempt.decision is not None:
            rank.knows_decision = True
            return self._answer(vote, attempt.decision and vote.vote)
        if attempt.is_inherited and vote.quorum_id is None and not vote.vote:
            # The rank has received no quorum from this manager, so it takes part in no attempt.
            self._answer(vote, False)
            return self._note_without_step(vote.group_rank)
        if rank.vote is not None:
            self._group.refuse(rank.vote.call, Superseded(f"rank {vote.group_rank} has voted again"))
        rank.vote = vote
        attempt.is_bound |= vote.is_bound
        if not vote.vote:
            return False
        rank.is_without_step = False
        return self._decision_if_complete()

    def decide(self, commit: bool) -> list[PendingVote]:
        """Record the decision on the current attempt. Return the votes to answer, in order of arrival."""
        attempt, votes = self._group.attempt, self.waiting
        assert attempt is not None
        attempt.decision = commit
        for rank in self._group.ranks:
            rank.knows_decision, rank.vote = rank.vote is not None, None
        self._group.decided[attempt.quorum_id, attempt.step] = commit
        while len(self._group.decided) > DECISIONS_KEPT:
            self._group.decided.popitem(last=False)
        return votes

    def _note_without_step(self, group_rank: int) -> bool | None:
        # The rank's process may be new, so another rank may still hold the step.
        self._group.ranks[group_rank].is_without_step = True
        return self._decision_if_complete()

    def _decision_if_complete(self) -> bool | None:
        commits = True
        for rank in self._group.ranks:
            if rank.vote is None:
                if not rank.is_without_step:
                    return None
                commits = False
        return commits

    def _begin_attempt(self, attempt: Attempt) -> Attempt:
        self._group.attempt = attempt
        for rank in self._group.ranks:
            rank.vote, rank.knows_decision, rank.is_without_step = None, False, False
        return attempt

    def _find(self, vote: PendingVote) -> Attempt | bool:
        """Return the attempt to which a vote belongs. If that is an earlier attempt, return its decision.

        Raise WrongState if the vote is for a different step or quorum than the current attempt.
        """
        attempt, decided = self._group.attempt, self._group.decided
        if attempt is None:
            return self._begin_attempt(Attempt(vote.quorum_id or 0, vote.step, is_opened=False))
        quorum_id = attempt.quorum_id if vote.quorum_id is None else vote.quorum_id
        if quorum_id == attempt.quorum_id and vote.step == attempt.step:
            if vote.quorum_id is not None or not self._is_over(attempt):
                return attempt
            decided.pop((quorum_id, vote.step), None)
            return self._begin_attempt(Attempt(quorum_id, vote.step, attempt.is_opened))
        if (quorum_id, vote.step) in decided:
            return decided[quorum_id, vote.step]
        is_in_force = attempt.is_opened or self.is_voting
        if is_in_force and quorum_id != attempt.quorum_id:
            what = f"the vote is for quorum {quorum_id}, but the current one is {attempt.quorum_id}"
            raise WrongState(f"quorum_id: {what}")
        if is_in_force and attempt.decision is None:
            raise WrongState(f"step: the vote is for step {vote.step}, but the current one is {attempt.step}")
        if attempt.decision is not None and vote.quorum_id == attempt.quorum_id and vote.step < attempt.step:
            raise WrongState(f"step: the vote is for step {vote.step}, but step {attempt.step} is already decided")
        return self._begin_attempt(Attempt(quorum_id, vote.step, is_opened=False))

    def _is_over(self, attempt: Attempt) -> bool:
        """Return whether all ranks have received the discard. If so, the next vote belongs to the retry."""
        return attempt.decision is False and all(rank.knows_decision for rank in self._group.ranks)

    def _answer(self, vote: PendingVote, commit: bool) -> None:
        self._group.effects.append(VoteAnswer(vote.call, Decision(commit)))

    def _refuse_all(self, error: LighthouseError) -> None:
        for vote in self.waiting:
            self._group.refuse(vote.call, error)
        for rank in self._group.ranks:
            rank.vote = None
