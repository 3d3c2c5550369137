"""A substitute for a collective. It completes when every participant of the quorum has reached the step."""

import contextlib
import json
import socket
import threading
from collections.abc import Mapping, Sequence

RESEND_S = 0.1

Place = tuple[str, int]


class AllReduce:
    """All-reduce without data. Each rank sends datagrams with its quorum and step to its peers' addresses."""

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
