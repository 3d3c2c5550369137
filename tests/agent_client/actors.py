"""What runs inside the ranks of ranks.py: a store, a gloo group, an Agent that is told each of its steps."""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvloop
from torch.distributed import PrefixStore, TCPStore

from agent_client.collectives.gloo import GlooGroup, connect_store
from agent_client.collectives.group_spec import GroupSpec
from agent_client.collectives.peers import Peers, connector
from agent_client.healing.fetch import Fetch
from agent_client.state.train_state import TrainState
from agent_client.step.agent import Agent
from agent_client.step.config import AgentConfig
from agent_client.step.rendezvous import GroupPlace
from lighthouse_runtime.process.loop import StopRequest
from manager.server import daemon
from manager.server.config import ManagerConfig
from tests.agent_client.assignments import assignment

LOOPBACK = "127.0.0.1"
MEETS_WITHIN_S = 120.0


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def build_agent(
    manager: str, state: TrainState, rank: int = 0, ranks: int = 1, meeting: str = "", key: str = "", **options: Any
) -> Agent:
    """The ranks of a group of several meet at the store `meeting` under `key`, new for each start of the group."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    group: GlooGroup | None = None
    if ranks > 1:
        store = PrefixStore(key or manager, connect_store(meeting, MEETS_WITHIN_S))
        times = {"connect_timeout_s": MEETS_WITHIN_S, "timeout_s": MEETS_WITHIN_S}
        group = GlooGroup(store, rank, ranks, LOOPBACK, **times)
    config = AgentConfig(advertise=LOOPBACK, **options)
    return Agent(manager, state=state, config=config, place=GroupPlace(rank, ranks, group))


def momenta(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]


class StoreActor:
    """Hosts a TCPStore, as a manager's store process does."""

    def serve(self, port: int = 0) -> str:
        self._store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
        return f"{LOOPBACK}:{self._store.port}"


class ManagerActor:
    """A manager, without the seconds that a new interpreter takes."""

    def serve(self, **settings: Any) -> str:
        """Its address, once it serves; it goes on until its process is killed."""
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        config = ManagerConfig(bind=f"{LOOPBACK}:0", advertise=LOOPBACK, **settings)
        receiving, sending = os.pipe()
        threading.Thread(target=self._run, args=(config, sending), daemon=True).start()
        with open(receiving) as pipe:
            return pipe.readline().strip()

    def _run(self, config: ManagerConfig, sending: int) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(daemon.serve(config, "", sending, StopRequest()))


def native_threads() -> set[str]:
    """All that Python has not started."""
    known = {str(thread.native_id) for thread in threading.enumerate()}
    return {task.name for task in Path("/proc/self/task").iterdir()} - known


class GlooActor:
    """One rank of a gloo group that is made and given up as it is told."""

    device = "cpu"
    connected_by = "gloo"

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.connector = connector(self.connected_by)
        self.group: Any = None
        self.is_reducing = False
        self.native_before = native_threads()

    def meet(self, store: str, key: str, rank: int, size: int, **options: float) -> float:
        """Seconds it took."""
        timeouts = {"connect_timeout_s": 60.0, "timeout_s": 100.0} | options
        began_at = time.monotonic()
        self.group = self.connector.connect(GroupSpec(store, key, rank, size, LOOPBACK, **timeouts))
        return time.monotonic() - began_at

    def all_reduce(self, seed: int, length: int) -> str:
        """The digest of the sum of what each rank drew from its seed."""
        assert self.group is not None
        tensor = torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(self.device)
        self.group.all_reduce(tensor)
        return digest(tensor)

    def reconfigure(self, store: str, key: str, rank: int, size: int, count: int) -> None:
        """Meet, reduce, abort and drop so many times, beside the peers that do the same. Each waits until all have
        reduced: gloo keeps a group that is aborted while a message of it is unsent."""
        meeting = connect_store(store, MEETS_WITHIN_S)
        for number in range(count):
            self.meet(store, f"{key}-{number}", rank, size)
            self.all_reduce(rank, 10)
            meeting.set(f"{key}-{number} reduced {rank}", "")
            meeting.wait([f"{key}-{number} reduced {each}" for each in range(size)])
            self.abort()
            self.drop()

    def meet_for_torch(self, *names: str) -> None:
        assert self.group is not None
        self.torch_groups = [self.group.for_torch(name) for name in names]

    def sum_for_torch(self) -> list[float]:
        """Of ones, in each group that was made for torch."""
        sums: list[float] = []
        for group in self.torch_groups:
            tensor = torch.ones(3)
            group.allreduce([tensor]).wait()
            sums.append(float(tensor.sum()) / 3)
        return sums

    def wait_in_all_reduce(self, torch_group: int | None = None) -> tuple[str, float]:
        """(the error in which it ended, when on the monotonic clock, which all processes share)"""
        assert self.group is not None
        self.is_reducing = True
        try:
            if torch_group is None:
                self.group.all_reduce(torch.ones(1000, device=self.device))
            else:
                self.torch_groups[torch_group].allreduce([torch.ones(1000)]).wait()
        except RuntimeError as e:
            return str(e), time.monotonic()
        finally:
            self.is_reducing = False
        return "", time.monotonic()

    def get_is_reducing(self) -> bool:
        return self.is_reducing

    def abort(self) -> tuple[float, float]:
        """(when it began, when it returned)"""
        assert self.group is not None
        began_at = time.monotonic()
        self.group.abort()
        return began_at, time.monotonic()

    def drop(self) -> None:
        self.group = None

    def connect(self, store: str, timeout_s: float) -> None:
        connect_store(store, timeout_s)

    def socket_inodes(self) -> None:
        """A listening one and a connected pair, over TCP like gloo's own."""
        self.listener = socket.create_server((LOOPBACK, 0))
        self.near = socket.create_connection(self.listener.getsockname())
        self.far, _ = self.listener.accept()

    def use_sockets(self) -> bytes:
        """What arrives over the old pair and over a new connection to the old listener."""
        self.near.sendall(b"old")
        with socket.create_connection(self.listener.getsockname()) as near:
            far, _ = self.listener.accept()
            with far:
                far.sendall(b" new")
                return self.far.recv(16) + near.recv(16)

    def is_connecting(self) -> bool:
        """gloo's own thread runs."""
        return bool(native_threads() - self.native_before)

    def held(self) -> tuple[int, int]:
        """How many (descriptors, threads) this process has."""
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class PeersActor:
    """The same rank of one of several replica groups."""

    def build(self, connect_timeout_s: float, **options: Any) -> None:
        torch.set_num_threads(1)
        self.revoked: dict[int, str] = {}
        self.peers = Peers(0, LOOPBACK, connect_timeout_s=connect_timeout_s, timeout_s=100.0, **options)

    def configure(self, store: str, quorum_id: int, rank: int, size: int) -> None:
        told = assignment(rank, size, quorum_id=quorum_id, store_address=store)
        self.peers.configure(told, lambda: self.revoked.get(quorum_id))

    def all_reduce(self) -> float:
        """Of ones."""
        tensor = torch.ones(1)
        self.peers.all_reduce(tensor, 100.0)
        return float(tensor)

    def exchange(self, *words: int) -> list[tuple[int, ...]]:
        return self.peers.exchange(words, 100.0)

    def quorum(self) -> int | None:
        return self.peers._quorum_id

    def is_meeting(self) -> bool:
        """gloo is at work, or waits for a key of a peer's."""
        return any(thread.name == "lighthouse peers" for thread in threading.enumerate())

    def revoke(self, quorum_id: int | None) -> None:
        self.peers.revoke(quorum_id, "a test says so")

    def was_revoked(self, quorum_id: int) -> None:
        """It is remembered; nothing is under way."""
        self.revoked[quorum_id] = "it was told before"

    def drop(self) -> None:
        self.peers.drop()


class AgentActor:
    """One rank of a replica group with a small model; each step of it is a call, and its faults are to be had."""

    device = "cpu"

    def build(self, manager: str, *, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)).to(self.device)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.agent = build_agent(manager, TrainState(self.model, self.sgd), **options)

    def ask(self) -> None:
        """Begin a step, to the point where its participants have met."""
        self.agent.start_quorum()
        self.agent.wait_quorum()

    def step(self, *, error: str = "", reduces: bool = True, within_group: bool = True) -> dict[str, Any]:
        """One step over a batch that is a function of the step and of the place in the quorum."""
        agent = self.agent
        agent.start_quorum()
        self.sgd.zero_grad()
        self.compute()
        if reduces:
            self.reduce(within_group=within_group)
        if error:
            agent.report_error(error)
        is_participating = agent.is_participating
        return self.describe(self.apply(), is_participating)

    def compute(self) -> None:
        place, _ = self.agent.slot()
        generator = torch.Generator().manual_seed(1000 * self.agent.current_step + place)
        self.backward(self.model(torch.randn(16, 8, generator=generator).to(self.device)).square().mean())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def reduce(self, **options: bool) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.agent.all_reduce(parameter.grad, **options).result()

    def reduce_integers(self) -> tuple[str, bool]:
        """The error of a mean of integers, and the decision on its step."""
        self.agent.start_quorum()
        done = self.agent.all_reduce(torch.ones(3, dtype=torch.int64))
        is_committed = self.agent.should_commit()
        return str(done.exception()), is_committed

    def apply(self) -> bool:
        """Vote, and apply the averaged gradients."""
        is_committed = self.agent.should_commit()
        if is_committed:
            self.sgd.step()
        return is_committed

    def describe(self, is_committed: bool, is_participating: bool) -> dict[str, Any]:
        """The step that has just ended."""
        agent = self.agent
        return {
            "committed": is_committed,
            "participated": is_participating,
            "step": agent.current_step,
            "quorum_id": agent.quorum_id,
            "participants": list(agent.participants),
            "batches": agent.batches_committed,
            "hash": self.hash(),
        }

    def steps(self, until: int) -> list[dict[str, Any]]:
        """All that were tried until `until` are committed."""
        tried: list[dict[str, Any]] = []
        while self.agent.current_step < until:
            tried.append(self.step())
        return tried

    def count_steps(self, for_s: float) -> int:
        """How many are tried in that time."""
        ends_at, count = time.monotonic() + for_s, 0
        while time.monotonic() < ends_at:
            self.step()
            count += 1
        return count

    def hash(self) -> str:
        """Of weights and momentum; the buffers are each group's own."""
        return digest(*self.model.parameters(), *momenta(self.sgd))

    def delay_fetch(self, by_s: float) -> None:
        """Every transfer from a peer takes so much longer."""

        def run_late(fetch: Fetch, run: Callable[[Fetch], Any] = Fetch.run) -> Any:
            time.sleep(by_s)
            return run(fetch)

        Fetch.run = run_late  # type: ignore[method-assign]

    def last_reconfiguration_s(self) -> float:
        return self.agent.last_reconfiguration_s

    def train_from(self, step: int, quorum_id: int, until: int) -> None:
        """As a script that has loaded that checkpoint does."""
        with self.agent:
            self.agent.load_state_dict({"step": step, "tag_quorum_id": quorum_id, "batches_committed": step})
            while self.agent.current_step < until:
                self.step()

    def fail(self, text: str) -> None:
        """An exception leaves the agent's block."""
        with contextlib.suppress(ValueError), self.agent:
            raise ValueError(text)

    def close(self) -> None:
        self.agent.close()

    def leave_in_child(self) -> int:
        """The status of a forked child that leaves the agent's block."""
        pid = os.fork()
        if not pid:
            try:
                with self.agent:
                    pass
                os._exit(3)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def held(self) -> int:
        """How many descriptors this process has."""
        return len(os.listdir("/proc/self/fd"))
