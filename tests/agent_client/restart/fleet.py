"""Ranks of one run as real processes, without torch: started as a supervisor would, and steered by files.

A rank trains until there is a file `finish`. It raises when it finds `raise-SLOT`. While there is a file `hang-SLOT`,
that rank stands still in a step, and the others get further and wait for it, as in a collective.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.processes import PATIENCE_S, Process, eventually

WORKER = """
import logging, os, pathlib, sys, time
logging.basicConfig(level="INFO", format="%(message)s")
from agent_client import CallWrapper, Wrapper

folder, slot = pathlib.Path(sys.argv[1]), os.environ["LIGHTHOUSE_SLOT"]
options = {"barrier_timeout": 300} | eval(sys.argv[2])

def another_hangs():
    return any(file.name != f"hang-{slot}" for file in folder.glob("hang-*"))

@Wrapper(use_global_iteration=True, **options)
def train(call_wrapper: CallWrapper):
    state = call_wrapper.state
    counters = (state.global_iteration_counter, state.job_restart_counter, state.ranks_restart_counter)
    print("runs", call_wrapper.iteration, os.environ["RANK"], os.environ["WORLD_SIZE"], *counters, flush=True)
    while not (folder / "finish").exists():
        time.sleep(0.02)
        while (folder / f"hang-{slot}").exists():
            time.sleep(0.02)
        call_wrapper.ping()
        if another_hangs():
            call_wrapper.ping(1_000_000)
            while another_hangs():
                time.sleep(0.02)
        if (folder / f"raise-{slot}").exists():
            (folder / f"raise-{slot}").unlink()
            raise RuntimeError("boom")

train()
print("has finished", flush=True)
"""


@dataclass(frozen=True)
class Place:
    """What a rank was told: `rank` of `size`, in generation `number`, and the documents' counters."""

    number: int
    rank: int
    size: int
    counters: tuple[int, int, int]


class Fleet:
    """A context manager that starts `slots` ranks; `slots` may be more than the run has."""

    def __init__(self, lighthouse: str, folder: Path, slots: int, *, options: str = "{}") -> None:
        self.slots = slots
        self._lighthouse = lighthouse
        self._folder = folder
        self._options = options
        self.run = uuid.uuid4().hex
        self._attempts: dict[int, int] = {}
        self.ranks: dict[int, Process] = {}

    def __enter__(self) -> Self:
        for slot in range(self.slots):
            self.start(slot)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks.values():
            rank.close()

    def start(self, slot: int, slots: int | None = None) -> Process:
        """Its first process, or the next one."""
        attempt = self._attempts[slot] = self._attempts.get(slot, -1) + 1
        variables = {
            "LIGHTHOUSE_ADDRESS": self._lighthouse,
            "LIGHTHOUSE_RUN_ID": self.run,
            "LIGHTHOUSE_SLOT": str(slot),
            "LIGHTHOUSE_WORLD_SIZE": str(slots or self.slots),
            "LIGHTHOUSE_ATTEMPT": str(attempt),
            "LIGHTHOUSE_STRIDE": "100",
            "LIGHTHOUSE_INCARNATION": uuid.uuid4().hex,
        }
        rank = Process(WORKER, [str(self._folder), self._options], env=variables)
        rank.launch()
        if slot in self.ranks:
            self.ranks[slot].close()
        self.ranks[slot] = rank
        return rank

    def fail(self, slot: int) -> None:
        (self._folder / f"raise-{slot}").touch()

    @contextmanager
    def hung(self, slot: int) -> Iterator[None]:
        file = self._folder / f"hang-{slot}"
        file.touch()
        yield
        file.unlink()

    def finish(self) -> None:
        (self._folder / "finish").touch()

    def kill(self, slot: int) -> None:
        self.ranks[slot].kill()

    # -- what is so

    def place(self, slot: int) -> Place | None:
        """Where it was last told to run."""
        found = re.findall(r"^runs (\d+) (\d+) (\d+) (\d+) (\d+) (\d+)$", self.ranks[slot].log(), re.MULTILINE)
        if not found:
            return None
        number, rank, size, *counters = map(int, found[-1])
        return Place(number, rank, size, (counters[0], counters[1], counters[2]))

    def runs(self, number: int, active: list[int]) -> list[Place]:
        """Once generation `number` runs: `active[i]` is rank i."""

        def look() -> list[Place] | None:
            places = [place for slot in active if (place := self.place(slot)) is not None]
            told = [(place.number, place.rank, place.size) for place in places]
            return places if told == [(number, rank, len(active)) for rank in range(len(active))] else None

        try:
            return eventually(look, within_s=2 * PATIENCE_S) or []  # processes start slowly on a busy machine
        except AssertionError:
            raise AssertionError(f"not {number} of {active}: {self.logs()}") from None

    def becomes_spare(self, slot: int, number: int) -> None:
        self.ranks[slot].wait_for_log(rf"^generation {number} runs without this rank, which is a spare$")

    def ends_with(self, status: int, slots: list[int]) -> None:
        ended = {slot: self.ranks[slot].wait() for slot in slots}
        assert ended == dict.fromkeys(slots, status), self.logs()

    def logs(self) -> str:
        return "\n".join(f"--- slot {slot}\n{rank.log()[-1500:]}" for slot, rank in self.ranks.items())
