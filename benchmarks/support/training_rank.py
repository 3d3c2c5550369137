"""The rank of a replica group of one, in a separate process. It trains without torch, by sleeping in its steps.

With our ManagerConnection and StepMachine it works like the Agent. AllReduce replaces the collective, which a revoke
aborts. With torchft's client there is no collective, since torchft's quorum round in every step synchronises the
groups. This favours torchft, because a real rank would wait in its collective before it noticed a loss.

It prints a line for each event, with CLOCK_MONOTONIC, which all processes of the machine share.
"""

import contextlib
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from agent_client.manager_client.client import ManagerConnection
from agent_client.step.rules.machine import StepMachine
from benchmarks.support.torchft_native import Client
from lighthouse_protocol.messages.membership import Assignment
from lighthouse_protocol.refusals import LighthouseError

TIMEOUT_S = 90.0
RESEND_S = 0.1

Place = tuple[str, int]


def tell(what: str, quorum_id: int, step: int, size: int) -> None:
    """Print an event in a single write, since the thread of the watch prints, too."""
    sys.stdout.write(json.dumps([time.monotonic(), what, quorum_id, step, size]) + "\n")
    sys.stdout.flush()


class AllReduce:
    """All-reduce without data. It completes when every participant of the quorum has reached the step.

    Each rank sends datagrams with its quorum and step to its peers' addresses.
    """

    def __init__(self, name: str, peers: Mapping[str, Place]) -> None:
        self._name = name
        self._peers = peers
        self._reached: dict[str, tuple[int, int]] = {}
        self._aborted: set[int] = set()
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(peers[name])
        threading.Thread(target=self._receive, name="all-reduce", daemon=True).start()

    def run(self, quorum_id: int, step: int, participants: Sequence[str]) -> bool:
        """Wait for the participants. Return False if the quorum is aborted first."""
        with self._changed:
            self._reached[self._name] = (quorum_id, step)
            self._send(quorum_id, step, participants)
            while quorum_id not in self._aborted and not self._is_complete(quorum_id, step, participants):
                if not self._changed.wait(RESEND_S):
                    self._send(quorum_id, step, participants)
            return self._is_complete(quorum_id, step, participants)

    def abort(self, quorum_id: int) -> None:
        with self._changed:
            self._aborted.add(quorum_id)
            self._changed.notify_all()

    def _is_complete(self, quorum_id: int, step: int, participants: Sequence[str]) -> bool:
        reached = (self._reached.get(name, (0, 0)) for name in participants)
        return all(of_quorum == quorum_id and so_far >= step for of_quorum, so_far in reached)

    def _send(self, quorum_id: int, step: int, participants: Sequence[str]) -> None:
        message = json.dumps([self._name, quorum_id, step]).encode()
        for name in participants:
            if name != self._name:
                with contextlib.suppress(OSError):  # the network may be unreachable
                    self._socket.sendto(message, self._peers[name])

    def _receive(self) -> None:
        while True:
            name, quorum_id, step = json.loads(self._socket.recv(1024))
            with self._changed:
                self._reached[name] = max(self._reached.get(name, (0, 0)), (quorum_id, step))
                self._changed.notify_all()


class OurRank:
    def __init__(self, manager: str, name: str, step_s: float, peers: Mapping[str, Place]) -> None:
        self._step_s = step_s
        self._all_reduce = AllReduce(name, peers)
        self._machine = StepMachine()
        self._assignment: Assignment | None = None
        self._link = ManagerConnection(manager, 0, secrets.token_hex(6), self._revoked, returns_within_s=0.0)

    def run_step(self) -> None:
        machine = self._machine
        assignment = self._ask()
        quorum_id, step, size = assignment.quorum_id, assignment.max_step, assignment.replica_world_size
        machine.ask()
        machine.accept_assignment(assignment)
        tell("quorum", quorum_id, step, size)
        time.sleep(self._step_s)
        if self._all_reduce.run(quorum_id, step, assignment.replica_ids):
            machine.record_reduction()
        if machine.must_install:
            machine.begin_install()
            machine.finish_install(step, None, 0)
        commit = self._link.vote(step, machine.vote(), quorum_id=quorum_id, timeout_s=TIMEOUT_S)
        machine.record_decision(commit)
        tell("commit" if commit else "discard", quorum_id, step, size)

    def _ask(self) -> Assignment:
        """Request the quorum of this step. If it is revoked before its use, vote no and request another."""
        machine = self._machine
        while True:
            try:
                tag, failures = machine.tag_quorum_id, machine.discards
                assignment = self._link.ask(
                    machine.step, "", tag_quorum_id=tag, commit_failures=failures, timeout_s=TIMEOUT_S
                )
            except LighthouseError as e:
                print(e, file=sys.stderr, flush=True)
                self._link.check_alive(e)
                continue
            self._assignment = assignment
            if not assignment.revoked and self._link.watch.revoked(assignment.quorum_id) is None:
                return assignment
            self._link.vote(assignment.max_step, False, quorum_id=assignment.quorum_id, timeout_s=TIMEOUT_S)
            machine.discards += 1

    def _revoked(self, quorum_id: int | None, reason: str) -> None:
        assignment = self._assignment
        held = assignment.quorum_id if assignment is not None else 0
        tell("revoked", quorum_id or held, self._machine.step, 0)
        self._all_reduce.abort(quorum_id or held)


class TorchftRank:
    def __init__(self, manager: str, step_s: float) -> None:
        self._client = Client(manager, TIMEOUT_S)
        self._step_s = step_s
        self._step = self._failures = 0

    def run_step(self) -> None:
        answer = self._client.quorum(self._step, self._failures)
        step = self._step = answer.max_step
        tell("quorum", answer.quorum_id, step, answer.replica_world_size)
        time.sleep(self._step_s)
        commit = self._client.should_commit(step)
        tell("commit" if commit else "discard", answer.quorum_id, step, answer.replica_world_size)
        self._step += commit
        self._failures = 0 if commit else self._failures + 1


def main() -> None:
    told = json.loads(sys.argv[1])
    manager, step_s = told["manager"], told["step_s"]
    peers = {name: (host, port) for name, (host, port) in told["peers"].items()}
    rank = TorchftRank(manager, step_s) if told["torchft"] else OurRank(manager, told["name"], step_s, peers)
    while True:
        rank.run_step()


if __name__ == "__main__":
    main()
