"""Measure how long the other nodes of a torchrun job wait for their next step after a node dies.

Three nodes with one worker each (`--nnodes 2:4`, gloo) run on one machine. One node is killed: its agent and its worker
get SIGKILL. Each of the three is killed in a separate job. The jobs use `--rdzv-backend lighthouse`, torchrun's `c10d`
with default timeouts, and `c10d` with short timeouts. The time ends with the first step that both other nodes have made
in a world of two. The store of c10d is on the node that was started first, so the death of this node ends the job.
"""

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import HERE, OURS, start_lighthouse
from benchmarks.support.figures import Bar, Measured, benchmark, table
from examples.ports import free_port
from manager.guard.process_tree import descendants

NODES = 3
SURVIVORS = NODES - 1
GIVEN_UP_S = 120.0
SETTLED_STEPS = 20
BAR = 0.5
"""Maximum ratio of our time to c10d's with short timeouts."""

AGENT = "from torch.distributed.run import main; main()"
OUR_AGENT = """
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from agent_client.torchrun.entry import get_handler
rendezvous_handler_registry.register("lighthouse", get_handler())
from torch.distributed.run import main; main()
"""
"""torchrun with our backend registered, since torchrun finds no entry point if the project is not installed."""


@dataclass(frozen=True, slots=True)
class Backend:
    name: str
    agent: str
    options: tuple[str, ...]


LIGHTHOUSE = Backend("lighthouse", OUR_AGENT, ("--rdzv-backend", "lighthouse"))
C10D = Backend("c10d", AGENT, ("--rdzv-backend", "c10d"))
SHORT = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
C10D_SHORT = Backend(f"c10d, {SHORT}", AGENT, ("--rdzv-backend", "c10d", "--rdzv-conf", SHORT))


@dataclass(frozen=True, slots=True)
class Loss:
    """Result of one kill."""

    backend: str
    victim: int  # number of the killed node, in the order of starts
    recovered_s: float | None  # None if the others did not continue


@dataclass(frozen=True, slots=True)
class Step:
    node: int
    at: float
    size: int


class Job:
    """Three nodes, whose steps are read in threads. `steps` gets None for a node that has ended."""

    def __init__(self, children: Children, backend: Backend, endpoint: str) -> None:
        self.steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        os.environ["OMP_NUM_THREADS"] = "1"
        options = [*backend.options, "--rdzv-endpoint", endpoint, "--rdzv-id", "benchmark", "--nnodes", "2:4"]
        options += ["--max-restarts", "10", "-m", "benchmarks.support.torchrun_rank"]
        self.nodes: list[Child] = []
        for number in range(NODES):
            node = children.start(f"node {number}", "-c", backend.agent, *options)
            self.nodes.append(node)
            threading.Thread(target=self._read, args=(number, node), daemon=True).start()
            if number == 0:
                time.sleep(1.0)  # c10d's store is on the first one

    def _read(self, number: int, node: Child) -> None:
        for line in node.lines():
            words = line.split()
            if words[:1] == ["step"]:
                self.steps.put(Step(number, float(words[1]), int(words[2])))
        self.steps.put(None)

    def wait(self, nodes: Sequence[int], size: int, after: float, steps: int = 1) -> float | None:
        """Return when each of `nodes` has made `steps` steps in a world of `size`, or None if they fail to."""
        counted = dict.fromkeys(nodes, 0)
        ends_at = time.monotonic() + GIVEN_UP_S
        ended = 0
        while (left_s := ends_at - time.monotonic()) > 0:
            try:
                step = self.steps.get(timeout=left_s)
            except queue.Empty:
                return None
            if step is None:
                ended += 1
                if ended > NODES - len(nodes):
                    return None
            elif step.node in counted and step.size == size and step.at > after:
                counted[step.node] += 1
                if min(counted.values()) >= steps:
                    return step.at
        return None

    def kill(self, number: int) -> float:
        """Kill all processes of a node at once, as if its machine died, and return the time."""
        node = self.nodes[number]
        node.signal(signal.SIGSTOP)
        below = descendants(node.pid)
        at = time.monotonic()
        for pid in (*below, node.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return at

    def end(self) -> None:
        for number in range(NODES):
            with contextlib.suppress(ProcessLookupError, OSError):
                self.kill(number)


def measure(backend: Backend, victim: int) -> Loss:
    with Children() as children:
        endpoint = f"{HERE}:{free_port()}"
        if backend is LIGHTHOUSE:
            endpoint = start_lighthouse(children, OURS, 1).address
        job = Job(children, backend, endpoint)
        try:
            if job.wait(range(NODES), NODES, 0.0, SETTLED_STEPS) is None:
                raise click.ClickException(f"{backend.name}: the three nodes do not train together")
            killed_at = job.kill(victim)
            others = [number for number in range(NODES) if number != victim]
            stepped_at = job.wait(others, SURVIVORS, killed_at)
        finally:
            job.end()
    return Loss(backend.name, victim, None if stepped_at is None else stepped_at - killed_at)


def render(losses: Sequence[Loss], backends: Sequence[Backend]) -> str:
    rows: list[list[str]] = []
    for victim in sorted({loss.victim for loss in losses}):
        took = {loss.backend: loss.recovered_s for loss in losses if loss.victim == victim}
        ours = took[LIGHTHOUSE.name]
        row = [f"node {victim}"]
        for backend in backends:
            theirs = took[backend.name]
            ratio = f" ({theirs / ours:.1f})" if ours and theirs and backend is not LIGHTHOUSE else ""
            row.append(("never" if theirs is None else f"{theirs:.1f} s") + ratio)
        rows.append(row)
    return table(["killed", *(backend.name for backend in backends)], rows)


def bars(losses: Sequence[Loss]) -> list[Bar]:
    took = {(loss.victim, loss.backend): loss.recovered_s for loss in losses}
    ours = {victim: at for (victim, backend), at in took.items() if backend == LIGHTHOUSE.name}
    found = [Bar("losses that ended the job", list(ours.values()).count(None), 0)]
    for victim, mine in ours.items():
        theirs = took.get((victim, C10D_SHORT.name))
        if mine is not None and theirs is not None:
            found.append(Bar(f"node {victim}, of c10d's with short timeouts", mine / theirs, BAR))
    return found


@benchmark("One loss, without c10d.")
def main(*, quick: bool) -> Measured:
    """Measure how long the other nodes of a torchrun job wait after a node dies."""
    backends = [LIGHTHOUSE] if quick else [LIGHTHOUSE, C10D_SHORT, C10D]
    losses = [measure(backend, victim) for victim in range(1 if quick else NODES) for backend in backends]
    return render(losses, backends), bars(losses), {"losses": losses}


if __name__ == "__main__":
    main()
