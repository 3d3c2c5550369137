"""Each fault of the documents' pseudo code (recovery.md, section 5) as a test: ours passes, the pseudo code fails.

The faults of its supervisor (an orphaned child, 130 reported as 0, a crash at import) are tested with the supervisor's.
"""

from collections.abc import Callable

import pytest

from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import LighthouseError
from tests.lighthouse.document_run import DocumentRun
from tests.lighthouse.run_stage import RunStage


class OurRun:
    """The same words for ours. A host's clock can be off as it likes: a rank sends no moment."""

    def __init__(self, world_size: int) -> None:
        self._stage = RunStage(world_size, obedient=False, stride=100)

    def start(self, *slots: int, environment: bool = True) -> None:
        self._stage.start(*slots)

    def skew(self, slot: int, by_s: float) -> None:
        self._stage.beat(slot)

    def kill(self, *slots: int) -> None:
        self._stage.kill(*slots)

    def kill_host_of_rank_0(self) -> None:
        self._stage.kill(0)

    def lose_coordination(self) -> None:
        self._stage.kill_lighthouse()

    def restart(self, slot: int) -> None:
        self._stage.start(slot)

    def ready(self, *slots: int) -> None:
        self._stage.ready(*slots)

    def restart_in_process(self) -> None:
        self._stage.fail(0)
        self._stage.ready(*self._stage.workers)

    def restart_processes(self) -> None:
        self._stage.kill(*self._stage.workers)
        self._stage.start(*self._stage.workers)

    def put(self, slot: int, key: str, value: str) -> None:
        self._stage.machine.keys.put(self.number(slot), KeyKind.ITERATION, key, value.encode())

    def get(self, slot: int, key: str) -> str | None:
        try:
            found = self._stage.machine.keys.present(self.number(slot)).get((KeyKind.ITERATION, key))
        except LighthouseError:
            return None
        return None if found is None else found.decode()

    def wait(self, seconds: float) -> None:
        self._stage.wait(seconds)

    def number(self, slot: int) -> int:
        number = self._stage.workers[slot].number
        return -1 if number is None else number

    @property
    def job_restarts(self) -> int:
        return self._stage.counters.job_restarts


Run = OurRun | DocumentRun


def numbers(run: Run, *slots: int) -> list[int]:
    return [run.number(slot) for slot in slots]


def wall_clocks_of_different_hosts_compared(run: Run) -> None:
    """31 s of skew kill a live rank: it is not waited for."""
    run.start(0, 1, 2, 3)
    run.skew(3, -31)
    run.ready(0, 1, 2)
    run.wait(1)
    assert numbers(run, 0, 1, 2) == [0, 0, 0]
    run.ready(3)
    run.wait(1)
    assert numbers(run, 0, 1, 2, 3) == [1, 1, 1, 1]


def rank_0_always_included(run: Run) -> None:
    """With rank 0 dead nothing is ever complete."""
    run.start(0, 1, 2, 3)
    run.kill(0)
    run.wait(35)
    run.ready(1, 2, 3)
    run.wait(1)
    assert numbers(run, 1, 2, 3) == [1, 1, 1]


def the_election_elects_the_dead(run: Run) -> None:
    """Those who did not win elect the lowest active rank, which is always 0, and write that down."""
    run.start(0, 1, 2, 3)
    run.kill(0)
    run.wait(35)
    run.ready(1, 2, 3)
    run.wait(70)
    run.ready(1, 2, 3)
    run.wait(70)
    assert numbers(run, 1, 2, 3) == [2, 2, 2]


def the_election_is_never_reset(run: Run) -> None:
    """The second failure elects nobody."""
    run.start(0, 1, 2, 3)
    run.kill(0)
    run.wait(35)
    run.ready(1, 2, 3)
    run.wait(70)
    assert numbers(run, 1, 2, 3) == [1, 1, 1]
    run.kill(1)
    run.wait(35)
    run.ready(2, 3)
    run.wait(200)
    assert numbers(run, 2, 3) == [2, 2]


def half_is_no_majority(run: Run) -> None:
    """Two of four go on without the other two, who live, and could do the same."""
    run.start(0, 1, 2, 3)
    run.ready(0, 1)
    run.wait(100)
    assert numbers(run, 0, 1) == [0, 0]
    run.ready(2)
    run.wait(1)
    assert numbers(run, 0, 1, 2) == [1, 1, 1]


def an_early_restart_is_taken_for_a_running_rank(run: Run) -> None:
    """Its predecessor's heartbeat is younger than 30 s."""
    run.start(0, 1, 2, 3)
    run.kill(1)
    run.wait(1)
    run.restart(1)
    run.ready(0, 2, 3)
    run.wait(70)
    assert run.number(1) > 0
    assert len(set(numbers(run, 0, 1, 2, 3))) == 1


def readiness_is_never_cleared(run: Run) -> None:
    """The second barrier passes before anyone came."""
    run.start(0, 1, 2, 3)
    run.ready(1, 2, 3)
    run.ready(0)
    assert numbers(run, 0, 1, 2, 3) == [1, 1, 1, 1]
    run.ready(0)
    run.wait(1)
    assert run.number(0) == 1


def a_local_number_when_coordination_fails(run: Run) -> None:
    """Everybody invents one of its own."""
    run.start(0, 1, 2, 3)
    run.lose_coordination()
    run.ready(0, 1)
    run.wait(10)
    assert numbers(run, 0, 1, 2, 3) == [0, 0, 0, 0]


def the_rank_of_a_spare(run: Run) -> None:
    """It has no RANK, takes itself for rank 0, and is ready in its name."""
    run.start(0, 1, 2)
    run.start(3, environment=False)
    run.ready(1, 2, 3)
    run.wait(1)
    assert numbers(run, 0, 1, 2) == [0, 0, 0]
    run.ready(0)
    run.wait(1)
    assert numbers(run, 0, 1, 2) == [1, 1, 1]


def two_allocators(run: Run) -> None:
    """100 restarts in the process run into the next session's numbers."""
    run.start(0, 1, 2, 3)
    used = {run.number(0)}
    for _ in range(100):
        run.restart_in_process()
        assert run.number(0) not in used
        used.add(run.number(0))
    run.restart_processes()
    assert run.number(0) not in used
    assert run.number(0) % 100 == 0


def the_job_counter_needs_everybody(run: Run) -> None:
    """Two of four die and never reach advance()."""
    run.start(0, 1, 2, 3)
    run.kill(2, 3)
    run.wait(35)
    run.ready(0, 1)
    run.wait(1)
    assert run.job_restarts == 1


def the_store_on_rank_0s_host(run: Run) -> None:
    """It dies with it, and the keys of the generation too."""
    run.start(0, 1, 2, 3)
    run.put(1, "loss_scale", "65536")
    assert run.get(2, "loss_scale") == "65536"
    run.kill_host_of_rank_0()
    assert run.get(2, "loss_scale") == "65536"


FAULTS = [
    wall_clocks_of_different_hosts_compared,
    rank_0_always_included,
    the_election_elects_the_dead,
    the_election_is_never_reset,
    half_is_no_majority,
    an_early_restart_is_taken_for_a_running_rank,
    readiness_is_never_cleared,
    a_local_number_when_coordination_fails,
    the_rank_of_a_spare,
    two_allocators,
    the_job_counter_needs_everybody,
    the_store_on_rank_0s_host,
]
by_name = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


@by_name
def test_ours_has_none(fault: Callable[[Run], None]):
    fault(OurRun(4))


@by_name
def test_the_pseudo_code_has_it(fault: Callable[[Run], None]):
    with pytest.raises(AssertionError):
        fault(DocumentRun(4))


def test_the_pseudo_code_works_where_nothing_fails():
    """So it is not the double that is broken."""
    run = DocumentRun(4)
    run.start(0, 1, 2, 3)
    run.ready(0, 1, 2)
    run.wait(5)
    assert numbers(run, 0, 1, 2, 3) == [0, 0, 0, 0]
    run.ready(3)
    assert numbers(run, 0, 1, 2, 3) == [1, 1, 1, 1]


def test_the_pseudo_code_catches_up_late():
    run = DocumentRun(4)
    run.start(0, 1, 2, 3)
    run.kill(1)
    run.wait(35)
    run.ready(0, 2, 3)
    run.wait(1)
    assert numbers(run, 0, 2, 3) == [1, 1, 1]
    run.restart(1)
    assert run.number(1) == 1
