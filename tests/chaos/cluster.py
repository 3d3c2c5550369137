"""A lighthouse, supervisors and their ranks as real processes, and what can happen to them."""

import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from examples.ports import free_port
from lighthouse.job.records import parse_run
from lighthouse_runtime.process.children import describe_listener
from manager.guard.process_tree import environment
from tests.daemons.supervisors import MARK, Supervisor
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, eventually

SUPERVISORS = "ab"
HAS_STORE = "a"  # one is enough: it imports torch at each start
RANKS_EACH = 4
SLOTS = len(SUPERVISORS) * RANKS_EACH
OPTIONS = ("--restart-scope", "rank", "--max-restarts", "60000", "--max-startup-failures", "0")
DELAYS = ("--restart-delay", "50ms", "--max-restart-delay", "300ms")
GENERATION = r"generation (\d+): slots ([\d ]+);"


class Cluster:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.logs: list[str] = []
        self.named: list[tuple[int, tuple[int, ...]]] = []
        self._port, self._store_port = free_port(), free_port()
        self._paused: dict[int, float] = {}
        self._lighthouse_back_at: float | None = None
        self._lighthouse = self._new_lighthouse()
        self._supervisors = {name: self._new_supervisor(name) for name in SUPERVISORS}

    def _new_lighthouse(self) -> Lighthouse:
        journal = str(self.folder / "journal")
        return Lighthouse("--rank-timeout", "2s", "--journal", journal, "--bind", f"{LOCALHOST}:{self._port}")

    def _new_supervisor(self, name: str) -> Supervisor:
        first = str(RANKS_EACH * SUPERVISORS.index(name))
        slots = ("--nproc-per-node", str(RANKS_EACH), "--slot-offset", first, "--run-world-size", str(SLOTS))
        words = [sys.executable, "-m", "tests.chaos.worker", str(self.folder)]
        store = ("--store", "auto", "--store-port", str(self._store_port)) if name == HAS_STORE else ()
        address = f"{LOCALHOST}:{self._port}"
        return Supervisor(address, *slots, *store, *OPTIONS, *DELAYS, command=words, replica_id=name)

    def __enter__(self) -> Self:
        self._lighthouse.__enter__()
        for supervisor in self._supervisors.values():
            supervisor.launch()
        for supervisor in self._supervisors.values():
            supervisor.wait_for_log("started ranks", 2 * PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._supervisors.values(), self._lighthouse):
            process.close()

    # -- what is

    def lines(self, slot: int) -> list[dict[str, Any]]:
        path = self.folder / f"slot-{slot}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def all_run(self) -> bool:
        """All slots, in one generation."""
        last = [lines[-1] if (lines := self.lines(slot)) else {} for slot in range(SLOTS)]
        return len({line.get("number") for line in last}) == 1 and all(line.get("what") == "runs" for line in last)

    def pids(self) -> list[int]:
        """Of ranks that live."""
        last = [lines[-1]["pid"] for slot in range(SLOTS) if (lines := self.lines(slot))]
        return [pid for pid in last if self._is_ours(pid)]

    def store_serves(self) -> bool:
        stores = self._supervisors[HAS_STORE].stores()
        return any(describe_listener(self._store_port).startswith(f"process {pid} ") for pid in stores)

    def _is_ours(self, pid: int) -> bool:
        marks = [f"{MARK}={supervisor.mark}".encode() for supervisor in self._supervisors.values()]
        seen = environment(pid)
        return any(mark in seen for mark in marks)

    # -- what happens

    def happen(self) -> str:
        """One event; its name. What was paused long enough goes on, and a killed lighthouse comes back."""
        [event] = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        event(self)
        return event.__name__

    def pass_time(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        self._go_on_with_time()
        while time.monotonic() < ends_at:
            time.sleep(0.02)
            self._go_on_with_time()

    def _go_on_with_time(self) -> None:
        now = time.monotonic()
        for pid in [pid for pid, until in self._paused.items() if now >= until]:
            self._go_on(pid)
        if self._lighthouse_back_at is not None and now >= self._lighthouse_back_at:
            self._start_lighthouse()

    def pass_until_all_run(self, at_most_s: float) -> None:
        ends_at = time.monotonic() + at_most_s
        while not self.all_run() and time.monotonic() < ends_at:
            self.pass_time(0.1)

    def recover(self) -> None:
        """No more faults: all go on."""
        for pid in list(self._paused):
            self._go_on(pid)
        if self._lighthouse_back_at is not None:
            self._start_lighthouse()

    def end(self) -> dict[str, int]:
        """The exit status of each supervisor, once the training has ended."""
        (self.folder / "end").touch()
        ended = {name: supervisor.wait(3 * PATIENCE_S) for name, supervisor in self._supervisors.items()}
        self.keep_lighthouse()
        return ended

    def _go_on(self, pid: int) -> None:
        del self._paused[pid]
        if self._is_ours(pid):
            os.kill(pid, signal.SIGCONT)

    def _any(self, look: Callable[[], list[int]], what: str) -> int:
        """Time passes until there is one: no rank is started while the lighthouse is away."""

        def now() -> list[int]:
            self.pass_time(0)
            return look()

        return self.random.choice(eventually(now, what))

    def _any_rank(self) -> int:
        return self._any(self.pids, "a rank that lives")

    def kill_rank(self) -> None:
        os.kill(self._any_rank(), signal.SIGKILL)

    def pause_rank(self) -> None:
        pid = self._any_rank()
        os.kill(pid, signal.SIGSTOP)
        self._paused[pid] = time.monotonic() + self.random.choice((0.2, 1.0, 3.0))

    def fail_rank(self) -> None:
        (self.folder / f"fail-{self.random.randrange(SLOTS)}").touch()

    def kill_supervisor(self) -> None:
        """Its ranks die with it; the scheduler starts it again."""
        name = self.random.choice(SUPERVISORS)
        old = self._supervisors[name]
        old.kill()
        eventually(old.gone, "the ranks of a killed supervisor are gone")
        self.logs.append(old.log())
        old.close()
        self._supervisors[name] = self._new_supervisor(name)
        self._supervisors[name].launch()

    def kill_store(self) -> None:
        """Whether it serves already or not; its supervisor starts it again."""
        os.kill(self._any(self._supervisors[HAS_STORE].stores, "a store"), signal.SIGKILL)

    def kill_lighthouse(self) -> None:
        if self._lighthouse_back_at is None:
            self._lighthouse.kill()
            self.keep_lighthouse()
            self._lighthouse_back_at = time.monotonic() + self.random.choice((0.0, 0.5, 2.0))

    def keep_lighthouse(self) -> None:
        """What it has said, and what it had written down and may have said."""
        self.logs.append(self._lighthouse.log())
        with sqlite3.connect(f"file:{self.folder / 'journal'}?mode=ro", uri=True) as db:
            records = [parse_run(raw) for (raw,) in db.execute("SELECT value FROM record WHERE key LIKE '/run/%'")]
        for record in records:
            if record.generation is not None:
                slots = tuple(rank.slot for rank in record.generation.active)
                self.named.append((record.generation.number, slots))

    def _start_lighthouse(self) -> None:
        self._lighthouse_back_at = None
        self._lighthouse.close()
        self._lighthouse = self._new_lighthouse()
        self._lighthouse.__enter__()


WEIGHTS: dict[Callable[[Cluster], None], int] = {
    Cluster.kill_rank: 8,
    Cluster.pause_rank: 5,
    Cluster.fail_rank: 6,
    Cluster.kill_supervisor: 1,
    Cluster.kill_store: 1,
    Cluster.kill_lighthouse: 2,
}
"""How often each event is drawn."""
