"""Memory in which this host's ranks keep their last committed states (lighthouse_runtime/process/kept_memory.py).

The supervisor only owns the memory. The ranks write and read it (agent_client/healing/keeper.py).
"""

from collections.abc import Mapping, Sequence

from lighthouse_protocol.messages.hosts import KeptState
from lighthouse_runtime.process.kept_memory import BUFFERS, buffer_path, make_buffer, read_header
from manager.supervisor.rules.plan import LaunchPlan


class Keepers:
    """Memory buffers for the last committed states of this host's ranks. They exist until the supervisor exits."""

    def __init__(self, plan: LaunchPlan, every: int) -> None:
        """Create the buffers, to which ranks copy their states every `every` steps. If `every` is 0, create none."""
        self._every = every
        self._is_torchrun = plan.torchrun is not None
        ranks = [slot - plan.slot_offset for slot in plan.own_slots] if every else []
        self._buffers = {rank: [make_buffer(plan.label(rank)) for _ in range(BUFFERS)] for rank in ranks}

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return the environment variables that name a rank's buffers or, under torchrun, those of all ranks."""
        if not self._every:
            return {}
        chosen = self._buffers.values() if self._is_torchrun else [self._buffers[rank]]
        paths = [buffer_path(buffer) for buffers in chosen for buffer in buffers]
        return {"LIGHTHOUSE_KEEP_EVERY": str(self._every), "LIGHTHOUSE_KEEPER": ":".join(paths)}

    def newest_states(self) -> tuple[KeptState, ...]:
        """Return the step and size of each rank's newest state, from the headers of its buffers."""
        return tuple(_newest(rank, buffers) for rank, buffers in self._buffers.items())


def _newest(rank: int, buffers: Sequence[int]) -> KeptState:
    headers = [header for header in map(read_header, buffers) if header is not None]
    headers.sort(key=lambda header: (header.quorum_id, header.step))
    kept = next((header for header in reversed(headers) if header.length), None)
    problem = headers[-1].problem if headers else ""
    return KeptState(rank, kept.step if kept else 0, kept.length if kept else 0, problem)
