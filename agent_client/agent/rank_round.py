"""A round between two steps: each rank of the last quorum brings bytes, and each receives what all have brought."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from agent_client.agent.background_thread import BackgroundThread
from agent_client.agent.rules.agreement import Announced, Kind
from agent_client.agent.rules.step import Phase
from agent_client.agent.step_runner import StepRunner
from agent_client.collectives.all_gather import AllGather
from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.peers import Peers
from agent_client.errors import AgentError, EvaluationInterrupted
from lighthouse_protocol.messages.progress import RankName

log = logging.getLogger(__name__)


class RankRounds:
    """Opens rounds. `group` connects the ranks of a group of several."""

    def __init__(
        self, runner: StepRunner, thread: BackgroundThread, peers: Peers, group: GlooGroup | None, group_rank: int
    ) -> None:
        self.runner = runner
        self.thread = thread
        self._peers = peers
        self._group = group
        self.group_rank = group_rank

    def open(self, what: str, within_s: float, *, may_begin: bool = False) -> "RankRound":
        """`may_begin`: also in the first step, before it has reduced anything.

        Raises EvaluationInterrupted without a quorum, and AgentError while a step is under way.
        """
        assignment, machine = self.runner.last, self.runner.machine
        if assignment is None or (machine.failure is not None and machine.phase is not Phase.IDLE):
            raise EvaluationInterrupted(f"{what}: there is no quorum: {machine.failure or 'do it after a step'}")
        if machine.phase is not Phase.IDLE and not (may_begin and machine.ended == 0):
            raise AgentError(f"{what}: a step is under way; call it between two steps, after the optimizer's step")
        if machine.phase is not Phase.IDLE and assignment.heals and assignment.max_step > 0:
            log.info("%s: compared inside this group only, because the other replica groups have trained already", what)
            assignment = replace(assignment, replica_rank=0, replica_world_size=1, replica_ids=())
        gathering = AllGather(assignment, self._peers, self._group, self.group_rank, within_s=within_s)
        return RankRound(what, gathering, self)


class RankRound:
    """`own_name` is the name of this rank."""

    def __init__(self, what: str, gathering: AllGather, rounds: RankRounds) -> None:
        self._what = what
        self.assignment = gathering.assignment
        self._gathering = gathering
        self._rounds = rounds
        self.own_name = self.name(self.assignment.replica_rank, rounds.group_rank)

    def name(self, replica_rank: int, group_rank: int) -> RankName:
        has_several = self.assignment.replica_world_size > 1
        return RankName(self.assignment.replica_ids[replica_rank] if has_several else "", group_rank)

    def named(self, brought: Sequence[Sequence[bytes]]) -> dict[RankName, str]:
        return {
            self.name(replica_rank, group_rank): text.decode(errors="replace")
            for replica_rank, of_ranks in enumerate(brought)
            for group_rank, text in enumerate(of_ranks)
        }

    def gather(self, own: bytes, operation: str, *, waits_for: str = "") -> list[list[bytes]]:
        """What all ranks have brought, by replica_rank and group_rank. Until then this rank is in the collective
        `operation`, or in a declared wait.

        Raises EvaluationInterrupted if a rank is lost; then the next step asks for another quorum.
        """
        runner, has_others = self._rounds.runner, self.assignment.replica_world_size > 1
        entry = runner.progress.numbers.inside()
        with (
            runner.progress.waiting_for(waits_for)
            if waits_for
            else runner.inside(entry, operation, within_group=not has_others)
        ):
            try:
                return self._rounds.thread.submit(lambda: self._gather(own, operation)).result()
            except EvaluationInterrupted as e:
                runner.machine.lost_between(str(e))
                raise EvaluationInterrupted(f"{self._what}: {e}") from e

    def _gather(self, own: bytes, operation: str) -> list[list[bytes]]:
        """The other participants may be about to reduce something."""
        runner = self._rounds.runner
        has_others = self.assignment.replica_world_size > 1

        def disagreement() -> str:
            announced = Announced(Kind.GATHER, name=operation)
            if not (runner.compares and has_others) or runner.agree(announced, self._gathering.within_s) is not None:
                return ""
            return runner.machine.failure or "the other participants do something else"

        return self._gathering.bring(own, disagreement)
