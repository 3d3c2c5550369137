"""Defects of a rank, as methods that take the place of its own, or its machine's."""

from typing import TYPE_CHECKING

from agent_client.step.rules.machine import Phase, StepMachine
from lighthouse_protocol.messages.membership import Assignment, DistrustKind
from tests.simulation.museum.exhibit import Replaced
from tests.simulation.quorums.rank import Rank

if TYPE_CHECKING:
    from tests.simulation.quorums.rank import Snapshot


def _every_yes(self: StepMachine) -> bool:
    return self.phase is Phase.VOTED and self.failure is None


def _nothing_happened(self: StepMachine, kind: DistrustKind, text: str) -> None:
    pass


NOT_APPLIED_UNNOTICED = (Replaced(StepMachine, "tear", _nothing_happened),)
YES_OF_ONE_DECIDES = (Replaced(StepMachine, "has_decided", property(_every_yes)),)


def _computes_beside_the_transfer(
    self: Rank, this_round: int, source: Rank, snapshot: "Snapshot", give_up_at: float, assignment: Assignment
) -> None:
    if this_round == self._round:
        self._received = snapshot
        self._compute(this_round)


def _installs_before_its_vote(self: Rank, this_round: int, is_ok: bool, total: int) -> None:
    if this_round != self._round:
        return
    received = self._received
    if not is_ok:
        self._fail(this_round, "the all-reduce failed")
        return
    self._sum, self._transformed_by = total, self.state
    self.machine.reduced()
    if received is not None:
        self.machine.installing()
        self.state = received.state
        self.machine.installed(received.step, received.tag_quorum_id, received.batches)
    self._vote(this_round)


INSTALLS_BEFORE_ITS_VOTE = (
    Replaced(Rank, "_fetched", _computes_beside_the_transfer),
    Replaced(Rank, "_on_sum", _installs_before_its_vote),
    Replaced(Rank, "says_heals_first", property(lambda _: None)),
)
