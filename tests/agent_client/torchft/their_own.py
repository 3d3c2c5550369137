"""A plugin under which torchft's own tests run on our servers.

Their test of a third group that begins when two others are two steps from their end leaves it to luck whether it has
asked for a quorum before those are through. Here the two wait until it has.
"""

from typing import Any

from agent_client.torchft import install

install()

from torchft.manager_integ_test import EventInjector, EventInjectorEvent, Runner  # noqa: E402  on what is installed

from lighthouse_protocol.messages.status import MemberState  # noqa: E402
from lighthouse_runtime.client.lighthouse import LighthouseClient  # noqa: E402
from tests.processes import eventually  # noqa: E402

_run_replica = Runner.run_replica
_check = EventInjector.check


def _run(self: Any) -> Any:
    self.event_injector.lighthouse_address = self.lighthouse_address
    return _run_replica(self)


def _check_and_wait(self: Any, rank: int, step: int) -> None:
    barriers = self.count[EventInjectorEvent.Barrier]
    _check(self, rank, step)
    if step > 0 and self.count[EventInjectorEvent.Barrier] > barriers:
        with LighthouseClient(self.lighthouse_address) as lighthouse:
            eventually(lambda: _all_have_asked(lighthouse), "every group asks for a quorum")


def _all_have_asked(lighthouse: LighthouseClient) -> bool:
    [job] = lighthouse.status().jobs
    return all(member.is_participant or member.state is MemberState.JOINED for member in job.members)


Runner.run_replica = _run
EventInjector.check = _check_and_wait
