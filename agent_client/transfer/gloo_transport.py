"""Live state over process groups: each pair of a source and a target meets in a gloo group of its own.

    int64: the length of the encoding (state/encoding.py) · the encoding, in messages of 4 MiB, the last one shorter
    back: int64, once all has been read; only then the source ends the connection, and gloo may lose nothing with it

The groups meet over the store of the quorum, under a prefix that names the quorum, the rank and the target, and that
only members of the quorum know, so nobody can read another state than the one it was dealt; the length, the checksums
and the format without code are those of the other transport. A broken group cannot go on where it broke: the target
turns to HTTP then.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import PrefixStore

from agent_client.collectives.gloo import GlooGroup, connect_store
from agent_client.collectives.group_spec import meeting_name
from agent_client.state.codec import Encoding, decode
from agent_client.state.tree import CorruptState, State
from agent_client.transfer.fetch import OnBytes
from lighthouse_protocol.messages.membership import Assignment

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4 * 2**20
STORE_PREFIX = "lighthouse/heal"
_SOURCE, _TARGET = 0, 1


class GroupTransport:
    """Of one rank. `silence_s` bounds meeting the other side, and each message. Raises RuntimeError for what breaks."""

    def __init__(self, group_rank: int, host: str, silence_s: float) -> None:
        self._group_rank = group_rank
        self._host = host
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._open: list[GlooGroup] = []
        self._cancelled_id = 0

    def send(self, assignment: Assignment, encoding: Encoding) -> None:
        """The same to all that heal from this rank, each on a thread of its own: one that breaks or hangs is left to
        itself, and holds up nobody else."""
        try:
            with ThreadPoolExecutor(max(1, len(assignment.serve_to))) as pool:
                list(pool.map(lambda target: self._send_to(assignment, target, encoding), assignment.serve_to))
        finally:
            self._abort()

    def _send_to(self, assignment: Assignment, target: int, encoding: Encoding) -> None:
        try:
            backend = self._meet(assignment, target, _SOURCE).backend
            for message in messages(encoding):
                backend.send([message], _TARGET, 0).wait()
            backend.recv([torch.zeros(1, dtype=torch.int64)], _TARGET, 0).wait()
        except RuntimeError as error:
            log.warning("%s did not receive the state: %s", assignment.replica_ids[target], error)

    def receive(
        self,
        assignment: Assignment,
        *,
        max_bytes: int,
        on_received: OnBytes = lambda source, received, total: None,
    ) -> State:
        """From the source that was dealt to this rank. CorruptState for what is no state. `on_received` as in Fetch.

        The connection is left for the source to end: what was sent last could be lost with it.
        """
        self._abort()
        try:
            source = assignment.replica_ids[assignment.heal_from_rank or 0]
            told = functools.partial(on_received, source)
            return self._receive(self._meet(assignment, assignment.replica_rank, _TARGET), max_bytes, told)
        except BaseException:
            self._abort()
            raise

    def _receive(self, group: GlooGroup, max_bytes: int, told: Callable[[int, int], None]) -> State:
        announced = torch.zeros(1, dtype=torch.int64)
        group.backend.recv([announced], _SOURCE, 0).wait()
        length = int(announced.item())
        if not 0 < length <= max_bytes:
            raise CorruptState(f"a state of {length} bytes was announced, and there is room for {max_bytes}")
        state = decode(_Messages(group, length, told), length)
        group.backend.send([announced], _SOURCE, 0).wait()
        return state

    def cancel(self, quorum_id: int) -> None:
        """End what is under way, or still to come, in that quorum. From any thread."""
        with self._lock:
            self._cancelled_id = max(self._cancelled_id, quorum_id)
        self._abort()

    def _meet(self, assignment: Assignment, target: int, place: int) -> GlooGroup:
        name = meeting_name(f"{STORE_PREFIX}/{assignment.quorum_id}/{self._group_rank}/{target}", assignment.secret)
        store = PrefixStore(name, connect_store(assignment.store_address, self._silence_s))
        group = GlooGroup(store, place, 2, self._host, connect_timeout_s=self._silence_s, timeout_s=self._silence_s)
        with self._lock:
            self._open.append(group)
            is_cancelled = assignment.quorum_id <= self._cancelled_id
        if is_cancelled:
            group.abort()
            raise RuntimeError(f"quorum {assignment.quorum_id} was revoked")
        return group

    def _abort(self) -> None:
        with self._lock:
            groups, self._open = self._open, []
        for group in groups:
            group.abort()


def messages(encoding: Encoding) -> Iterator[torch.Tensor]:
    """What is sent, one after the other in one buffer: use each before the next is asked for."""
    yield torch.tensor([encoding.length])
    buffer = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    view, filled = buffer.numpy().data, 0
    for chunk in encoding:
        while chunk:
            count = min(len(chunk), MESSAGE_BYTES - filled)
            view[filled : filled + count] = chunk[:count]
            chunk, filled = chunk[count:], filled + count
            if filled == MESSAGE_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


class _Messages:
    """What arrives, as the bytes that decode() reads."""

    def __init__(self, group: GlooGroup, length: int, told: Callable[[int, int], None]) -> None:
        self._group = group
        self._told = told
        self._length = self._left = length
        self._message = torch.empty(0, dtype=torch.uint8)

    def readinto(self, buffer: memoryview, /) -> int:
        if not len(self._message) and self._left:
            self._message = torch.empty(min(MESSAGE_BYTES, self._left), dtype=torch.uint8)
            self._group.backend.recv([self._message], _SOURCE, 0).wait()
            self._left -= len(self._message)
            self._told(self._length - self._left, self._length)
        count = min(len(buffer), len(self._message))
        buffer[:count] = self._message[:count].numpy().data
        self._message = self._message[count:]
        return count
