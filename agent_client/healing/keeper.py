"""Keeps this rank's last committed states in its supervisor's memory, and restores one after a restart.

A rank that restarts usually copies the state of a live peer. If all ranks in all groups have died, no peer is left. The
rank then continues from the state that it has kept itself, and its group joins with the tag of that state. If the
groups have kept different states, or the memory of a host is lost, the usual rules apply: the groups at the newest
state send it to the others. So the states that one group has kept are also a backup for the other groups.

Every `every` steps, a thread copies the state while the step computes, reading the tensors in place. The rank waits for
the copy before its vote, because the state may change afterwards. So once a step is committed, all ranks in the group
have copied the state with which it began, and each of them may overwrite the older of its two buffers. At any time, all
ranks in a group have a state of at least one common step in their buffers.
"""

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from xxhash import xxh3_64

from agent_client.healing.connection import Pace
from agent_client.healing.healing import available_bytes, has_room
from agent_client.state.codec import decode_from, encode
from agent_client.state.random_state import random_state
from agent_client.state.snapshot import StateMismatch
from agent_client.state.train_state import TrainState
from agent_client.state.tree import CorruptState, State
from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.membership import Tag
from lighthouse_runtime.process.kept_memory import BUFFERS, HEADER_BYTES, BufferHeader, read_header, write_header

log = logging.getLogger(__name__)

Sum = Callable[[torch.Tensor], torch.Tensor]

FINISH_TIMEOUT_S = 60.0
"""Time limit in seconds for the wait for a copy before a vote. A copy may hang with its GPU."""
CLOSE_TIMEOUT_S = 5.0


class Keeper:
    """Copies one rank's states into its supervisor's memory. Call its methods between two steps, or before a vote."""

    def __init__(self, state: TrainState, every: int, paths: Sequence[str], owner: str) -> None:
        """Open the buffers at `paths`. If that fails, only log a warning, and keep no states.

        The state is copied every `every` steps. `owner` is this rank's name in the headers of the buffers.
        """
        self._every = every
        self._owner = owner
        self._state = state
        self._buffers: list[int] = []
        """File descriptors of the buffers, or empty if this rank keeps no states."""
        self._lock = threading.Lock()
        self._is_stuck = False
        """True once a copy has taken too long. Its thread may still write a state, but no header."""
        self._next = 0
        """Index of the buffer to write next."""
        self._last: Tag | None = None
        self._thread: threading.Thread | None = None
        self._is_awaited = threading.Event()
        self._was_late = False
        """True if the last copy was not complete before the vote. The next copy is then made without rests."""
        self._reads_in_place = False
        self._problem = ""
        try:
            for path in paths:
                self._buffers.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            log.warning("cannot use the memory of this rank's supervisor, so no state is kept: %s", error)

    # -- keeping

    def keep(self, agent: dict[str, Any]) -> None:
        """Start copying the state if the step number is a multiple of `every`. Call this when each step begins.

        `agent` is the Agent's own part of the state, such as the step number.
        """
        self.finish()
        tag = Tag(agent["step"], agent["tag_quorum_id"])
        if not tag.step or tag.step % self._every or tag == self._last or tag.quorum_id is None:
            return
        if self._is_stuck or not self._buffers:
            return
        self._last, self._reads_in_place = tag, self._state.stands_still
        self._is_awaited.clear()
        computed = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        state = {"agent": agent, "random": random_state()}
        self._thread = threading.Thread(
            target=self._write, args=(tag, state, computed), name="lighthouse keeper", daemon=True
        )
        self._thread.start()
        if not self._reads_in_place:
            self.finish()

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Wait until the copy of the state is complete. If the script has changed the state meanwhile, drop the copy.

        If the copy is not complete after `timeout_s`, drop it, and stop keeping copies.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._was_late = thread.is_alive()
        self._is_awaited.set()
        thread.join(timeout_s)
        if thread.is_alive():
            problem = f"the copy was not complete after {timeout_s:g} s; this rank keeps no more states"
            log.error("the state is not kept in memory: %s", problem)
            with self._lock:
                self._is_stuck = True
                write_header(self._buffers[self._next], self._explain(problem))
        elif self._reads_in_place and not self._state.stands_still:
            write_header(self._buffers[self._next], None)
        elif not self._problem:
            self._next = 1 - self._next

    def clear(self) -> None:
        """Drop all kept states. Call this when this rank's state has turned out to differ from its peers' states."""
        self.finish()
        self._last = None
        for buffer in self._buffers:
            write_header(buffer, None)

    def close(self) -> None:
        self.finish(CLOSE_TIMEOUT_S)
        if self._is_stuck:
            return  # the thread may still write to the buffers
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            os.close(buffer)

    def _write(self, tag: Tag, state: dict[str, State], computed: "torch.cuda.Event | None") -> None:
        try:
            with _own_stream(computed):
                problem = self._copy(tag, {**state, "train": self._state.in_place()})
        except Exception as error:  # noqa: BLE001  training must not end because a copy of its state failed
            problem = f"{type(error).__name__}: {error}"
        if problem:
            try:
                self._write_header(self._explain(problem))
            except (OSError, ValueError) as error:
                problem += f" (missing in the manager's status: {error})"
        if problem and not self._problem:
            log.warning("step %d is not kept in memory: %s", tag.step, problem)
        self._problem = problem

    def _copy(self, tag: Tag, state: State) -> str:
        """Write a state into the next buffer. Return an empty string, or an explanation if there is no room for it."""
        encoding = encode(state)
        size = HEADER_BYTES + encoding.length
        missing = sum(max(0, size - os.fstat(each).st_size) for each in self._buffers)
        if missing and not has_room(missing):
            return (
                f"two copies need {missing >> 20} MiB more for each rank of this host, and twice that must be "
                f"available, not {available_bytes() >> 20} MiB; free memory, or run without --keep-every"
            )
        for each in self._buffers:
            os.posix_fallocate(each, 0, size)
        self._write_header(None)
        # With a lower priority, the thread could be starved while the rank waits for it before its vote.
        digest, at, pace, was_late = xxh3_64(), HEADER_BYTES, Pace(niceness=0), self._was_late
        for chunk in encoding:
            digest.update(chunk)
            _write_all(self._buffers[self._next], chunk, at)
            at += len(chunk)
            if not (self._is_awaited.is_set() or was_late):
                pace.rest()
        step, quorum_id = tag
        self._write_header(BufferHeader(self._owner, step, quorum_id or 0, encoding.length, digest.hexdigest()))
        return ""

    def _explain(self, problem: str) -> BufferHeader:
        step, quorum_id = self._last or Tag(0, 0)
        return BufferHeader(self._owner, step, quorum_id or 0, problem=cut_reason(problem))

    def _write_header(self, header: BufferHeader | None) -> None:
        with self._lock:
            if not self._is_stuck:
                write_header(self._buffers[self._next], header)

    # -- restoring

    def restore(self, rank: int, ranks: int, above: Tag, sum_over_group: Sum) -> State | None:
        """Return the newest state that all ranks in the group have kept, or None if none is newer than `above`.

        All ranks in the group call this together. `rank` is this rank's number, and `ranks` is the size of the group.
        `sum_over_group` sums a tensor over these ranks. The returned tensors are on the CPU.
        """
        kept = {buffer: tag for buffer in self._buffers if (tag := self._tag_in(buffer)) is not None}
        while True:
            rows = torch.zeros(ranks, BUFFERS, 2, dtype=torch.int64)
            for place, tag in enumerate(kept.values()):
                rows[rank, place] = torch.tensor([tag.step, tag.quorum_id])
            summed: list[list[list[int]]] = sum_over_group(rows).tolist()
            common = set.intersection(*({(step, quorum_id) for step, quorum_id in row if step} for row in summed))
            # Quorum ids only increase, so a state of a later quorum is newer, even if its step is lower.
            newest = max((Tag(*each) for each in common), key=lambda tag: (tag.quorum_id, tag.step), default=None)
            # `above` may come from a checkpoint of an earlier run, whose quorum ids do not compare with these.
            if newest is None or newest.step <= above.step:
                return None
            chosen = next(buffer for buffer in kept if kept[buffer] == newest)
            state = self._read(chosen, newest)
            failed = sum_over_group(torch.tensor([int(state is None)])).tolist()
            if failed == [0]:
                for buffer in kept:
                    if buffer != chosen:  # a step that not all ranks have kept, or an older one
                        write_header(buffer, None)
                self._next, self._last = 1 - self._buffers.index(chosen), newest
                return state
            del kept[chosen]

    def _tag_in(self, buffer: int) -> Tag | None:
        header = read_header(buffer)
        if header is None or header.owner != self._owner or not header.length:
            return None
        return Tag(header.step, header.quorum_id)

    def _read(self, buffer: int, tag: Tag) -> State | None:
        header = read_header(buffer)
        assert header is not None
        try:
            with open(buffer, "rb", closefd=False) as file:
                file.seek(HEADER_BYTES)
                state = decode_from(file, header.length)
            # The codec checks each piece, but a piece that remains from an older copy has a valid checksum.
            with mmap.mmap(buffer, HEADER_BYTES + header.length, prot=mmap.PROT_READ) as kept, memoryview(kept) as view:
                if xxh3_64(view[HEADER_BYTES:]).hexdigest() != header.digest:
                    raise CorruptState("its checksum is wrong")
            match state:
                case {"train": dict() as train, "random": dict(), "agent": {"step": step, "tag_quorum_id": quorum_id}}:
                    if (step, quorum_id) != tag:
                        raise CorruptState(f"it is of step {step} of quorum {quorum_id}")
                    self._state.begin_step()
                    self._state.check(train)
                    return state
                case _:
                    raise CorruptState("it is not the state of an Agent")
        except (CorruptState, StateMismatch, OSError) as error:
            log.warning("the state of step %d that was kept in memory cannot be used: %s", tag.step, error)
            return None


def _write_all(descriptor: int, chunk: memoryview, at: int) -> None:
    left = memoryview(chunk).cast("B")
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written


@contextlib.contextmanager
def _own_stream(computed: "torch.cuda.Event | None") -> Generator[None]:
    """Run the block's copies on a separate CUDA stream, after the event `computed` and in parallel with training."""
    if computed is None:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_event(computed)
    with torch.cuda.stream(stream):
        yield
