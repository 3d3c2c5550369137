"""Memory in which this host's ranks keep their last committed states (lighthouse_runtime/process/slots.py).

The supervisor only owns the memory. The ranks write and read it (agent_client/healing/keeper.py).
"""

from collections.abc import Mapping, Sequence

from lighthouse_protocol.messages.hosts import KeptState
from lighthouse_runtime.process.slots import SLOTS, make_slot, read_header, slot_path
from manager.supervisor.rules.plan import LaunchPlan


class Keepers:
    """Memory slots for the last committed states of this host's ranks. They exist as long as the supervisor."""

    def __init__(self, plan: LaunchPlan, every: int) -> None:
        """Create the slots. Every `every` steps, the ranks keep their states in them. If `every` is 0, create none."""
        self._every = every
        self._is_torchrun = plan.torchrun is not None
        first = plan.own_slots[0] - plan.slot_offset
        ranks = range(first, first + len(plan.own_slots)) if every else ()
        self._slots = {rank: [make_slot(plan.label(rank)) for _ in range(SLOTS)] for rank in ranks}

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return the environment variables that name a rank's slots. Under torchrun, they name those of all ranks."""
        if not self._every:
            return {}
        chosen = self._slots.values() if self._is_torchrun else [self._slots[rank]]
        paths = [slot_path(slot) for slots in chosen for slot in slots]
        return {"LIGHTHOUSE_KEEP_EVERY": str(self._every), "LIGHTHOUSE_KEEPER": ":".join(paths)}

    def newest_states(self) -> tuple[KeptState, ...]:
        """Return the step and size of each rank's newest state, from the headers of its slots."""
        return tuple(_newest(rank, slots) for rank, slots in self._slots.items())


def _newest(rank: int, slots: Sequence[int]) -> KeptState:
    headers = [header for header in map(read_header, slots) if header is not None]
    newest = max(headers, key=lambda header: (header.quorum_id, header.step), default=None)
    problem = next((header.problem for header in headers if header.problem), "")
    return KeptState(rank, newest.step, newest.length, problem) if newest is not None else KeptState(rank)
