"""What the driver does beside its machine: timers that have no caller. All else of it runs in the simulator."""

from collections.abc import Sequence

from lighthouse.quorum.driver import JobDriver
from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.events import Effect, Event, Withdrawn
from lighthouse.quorum.rules.machine import QuorumMachine
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse.quorum.waiting_joins import Answer
from lighthouse_protocol.refusals import DeadlinePassed, Unreachable
from tests.lighthouse.builders import group
from tests.lighthouse.peers import Caller
from tests.virtual_loop import VirtualLoop


def unwritable(record: QuorumRecord) -> None:
    raise Unreachable("no space left on device")


def test_a_quorum_that_cannot_be_written_down_by_a_timer_raises_nothing():
    """a is waited for by nobody, and forms without b, which is alive, when its time for that is over."""
    loop = VirtualLoop()
    machine = QuorumMachine(QuorumConfig(min_replicas=1, join_timeout_s=2.0))
    driver = JobDriver("j", machine, loop, loop.time, unwritable)
    driver.beat("b", "b.0")
    driver.join(group("a"), 60.0, Caller[Answer]())
    loop.go(4.0)
    assert machine.quorum is not None


def test_a_call_whose_time_is_over_is_answered_though_the_next_quorum_cannot_be_written_down():
    class Machine(QuorumMachine):
        def handle(self, event: Event, now: float) -> Sequence[Effect]:
            if isinstance(event, Withdrawn):
                unwritable(None)  # pyright: ignore[reportArgumentType]
            return super().handle(event, now)

    loop, caller = VirtualLoop(), Caller[Answer]()
    driver = JobDriver("j", Machine(QuorumConfig(min_replicas=2)), loop, loop.time, unwritable)
    driver.join(group("a"), 10.0, caller)
    loop.go(11.0)
    assert [type(error) for error in caller.errors] == [DeadlinePassed]
