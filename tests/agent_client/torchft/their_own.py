"""A plugin under which torchft's own tests run on our servers.

Their test of a third group that begins when two others are two steps from their end leaves it to luck whether it has
asked for a quorum before those are through. Here the two wait until it has.
Their groups are threads that share torch's generator. A lock keeps them apart while one seeds it and makes its model,
but not from one that draws its batch already; where nothing is healed at the start, the weights then differ for good.
Their lighthouses wait a tenth of a second for a late group: one that a busy machine holds up for longer is left out,
and alone once the others have done their last step. Here a group may be seconds late.
"""

from collections.abc import Callable
from typing import Any

import torch

from agent_client.torchft import install

install()

from torchft.manager_integ_test import (  # noqa: E402  on what is installed
    INIT_LOCK,
    EventInjector,
    EventInjectorEvent,
    Runner,
)

from agent_client.torchft import servers  # noqa: E402
from lighthouse_protocol.messages.status import MemberState  # noqa: E402
from lighthouse_runtime.client.clients import LighthouseClient  # noqa: E402
from tests.processes import eventually  # noqa: E402

servers._JOIN_TIMEOUT_MS = 5000  # pyright: ignore[reportPrivateUsage]
_run_replica = Runner.run_replica
_check = EventInjector.check


def _run(self: Any) -> Any:
    self.event_injector.lighthouse_address = self.lighthouse_address
    return _run_replica(self)


def _check_and_wait(self: Any, rank: int, step: int) -> None:
    info = self._events.get((rank, step))
    _check(self, rank, step)
    if step > 0 and info is not None and info.event is EventInjectorEvent.Barrier:
        with LighthouseClient(self.lighthouse_address) as lighthouse:
            eventually(lambda: _have_asked(lighthouse) == info.data.parties, "every group asks for a quorum")


def _have_asked(lighthouse: LighthouseClient) -> int:
    """A manager that has just started is no member yet, so it is not enough that all members have asked."""
    [job] = lighthouse.status().jobs
    return sum(member.is_participant or member.state is MemberState.JOINED for member in job.members)


def _apart(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drawn(*args: Any, **options: Any) -> torch.Tensor:
        with INIT_LOCK:
            return draw(*args, **options)

    return drawn


torch.rand, torch.randint = _apart(torch.rand), _apart(torch.randint)
Runner.run_replica = _run
EventInjector.check = _check_and_wait
