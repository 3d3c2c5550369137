"""Collects evidence of what each rank is doing, at the request of the lighthouse.

All ranks are queried in parallel, each with a fixed time limit. A rank that can still run Python answers with its
stacks and its latest collectives. A process on this host is also inspected from outside. Its state is read from /proc.
If the rank does not answer, a signal makes its process write its Python stacks. Ranks that answer are not signalled,
because the signal may crash a process that is running Python. Missing evidence is reported with the reason. A rank is
also inspected after its watch (its stream to the manager) has closed, because its process may still exist, for example
stopped by a signal.

An inspection from outside blocks, and reading /proc can hang if the process is stuck in the kernel. Therefore each
inspection runs in its own thread with a time limit.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.incident import (
    GATHERED_WITHIN_S,
    STACKS_FILE,
    EvidenceAsked,
    ProcessSnapshot,
    RankEvidence,
    SelfReport,
    fit_evidence,
)
from lighthouse_protocol.messages.progress import GroupView
from lighthouse_protocol.messages.session import EvidenceOffer, WatchHello
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.children import process_descriptor
from lighthouse_runtime.process.loop import start_part
from lighthouse_runtime.timing.pacing import start_read
from manager.group.driver import Watch

# -- process state, from /proc

STOPPED = "Tt"
_MEANING = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "stopped by a tracer",
    "Z": "ended, not reaped",
    "X": "ended",
    "I": "idle",
}
_TICKS = os.sysconf("SC_CLK_TCK")
_NAMED = 4


@dataclass(frozen=True, slots=True)
class ThreadState:
    tid: int
    name: str
    state: str
    utime_s: float
    stime_s: float
    wchan: str = ""  # kernel function in which the thread is waiting; empty if none, or if hidden from this user

    def __str__(self) -> str:
        waits = f", wchan {self.wchan}" if self.wchan else ""
        return f"{_describe_state(self.state)}{waits}, utime {self.utime_s:.1f} s, stime {self.stime_s:.1f} s"


@dataclass(frozen=True, slots=True)
class ProcessState:
    pid: int
    state: str
    caught: int  # bitmask of the signals that have a handler; bit 0 is signal 1
    rss_kib: int | None  # resident memory in KiB, or None for a zombie
    threads: tuple[ThreadState, ...]

    @property
    def is_stopped(self) -> bool:
        return self.state in STOPPED

    def handles(self, number: int) -> bool:
        return bool(self.caught >> (number - 1) & 1)

    def __str__(self) -> str:
        main, others = self.threads[0], self.threads[1:]
        rss = "no memory" if self.rss_kib is None else f"VmRSS {self.rss_kib / 1024:.1f} MiB"
        head = f"pid {self.pid} ({main.name}): {_describe_state(self.state)}, {rss}, threads: {len(self.threads)}"
        return "\n".join([head, f"main thread: {main}", *_lines(others)])


def _describe_state(state: str) -> str:
    return f"{state} ({_MEANING.get(state, 'unknown')})"


def _lines(threads: Sequence[ThreadState]) -> Iterable[str]:
    """Yield one line for each set of threads that have the same name, state and kernel function."""
    alike: dict[tuple[str, str, str], list[ThreadState]] = {}
    for thread in threads:
        alike.setdefault((thread.name, thread.state, thread.wchan), []).append(thread)
    for (name, state, wchan), some in alike.items():
        ids = ", ".join(str(thread.tid) for thread in some[:_NAMED]) + (", ..." if len(some) > _NAMED else "")
        times = sum(thread.utime_s for thread in some), sum(thread.stime_s for thread in some)
        word = "thread" if len(some) == 1 else f"{len(some)} threads"
        yield f"{word} {name} ({ids}): {ThreadState(0, name, state, *times, wchan)}"


def read_process(pid: int) -> ProcessState:
    """Read the state of a process. Raise OSError if it has ended or is not visible."""
    folder = Path(f"/proc/{pid}")
    status = (folder / "status").read_text(errors="replace")
    rss = _field(status, "VmRSS")
    threads = [read_thread(folder)]
    for tid in sorted(map(int, os.listdir(folder / "task"))):
        if tid != pid:
            with contextlib.suppress(OSError):  # the thread has ended
                threads.append(read_thread(folder / f"task/{tid}"))
    caught = int(_field(status, "SigCgt") or "0", 16)
    return ProcessState(pid, threads[0].state, caught, int(rss) if rss else None, tuple(threads))


def read_thread(folder: Path) -> ThreadState:
    """Read the state of a thread from /proc/PID or /proc/PID/task/TID. Raise OSError if it has ended."""
    number, _, rest = (folder / "stat").read_text(errors="replace").partition(" (")
    name, _, rest = rest.rpartition(") ")
    fields = rest.split()
    utime_s, stime_s = (int(ticks) / _TICKS for ticks in fields[11:13])
    return ThreadState(int(number), name, fields[0], utime_s, stime_s, _wchan(folder))


def _wchan(folder: Path) -> str:
    try:
        wchan = (folder / "wchan").read_text()
    except OSError:
        return ""
    return "" if wchan == "0" else wchan


def _field(status: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(\w+)", status, re.MULTILINE)
    return found[1] if found else ""


# -- Python stacks
#
# A signal makes the process write its stacks to a memfd, even while it cannot run Python. The signal would kill a
# process that has no handler for it. So it is sent through a pidfd, never by pid, and only if the kernel reports a
# handler and the process still has the memfd open that it offered.

_FILE = f"/memfd:{STACKS_FILE}"
_POLL_S = 0.01
# The handler makes many small writes, and a busy host may delay them.
_REST_S = 0.2
_MOST_BYTES = 1 << 20


class NoStacksError(Exception):
    """Raised if the stacks of a process cannot be obtained. The message gives the reason."""


def take_stacks(descriptor: int, state: ProcessState, offer: EvidenceOffer, within_s: float) -> str:
    """Make a process write its Python stacks, and return them. Block for at most `within_s` seconds.

    `descriptor` is a pidfd. `offer` names the signal to send, and the file to which the process's handler writes.
    Raise NoStacksError if the process cannot be signalled, or has written nothing in time.
    """
    if not offer.signal:
        raise NoStacksError("it has no handler that writes its stacks")
    if state.is_stopped:
        raise NoStacksError("it is stopped and cannot run a handler")
    if not state.handles(offer.signal):
        raise NoStacksError(f"it has no handler for signal {offer.signal} any more, and the signal would kill it")
    try:
        with _opened(state.pid, offer.descriptor) as file:
            os.ftruncate(file, 0)  # discard earlier stacks
            signal.pidfd_send_signal(descriptor, offer.signal)
            return _written(file, time.monotonic() + within_s, within_s)
    except OSError as e:
        raise NoStacksError(f"of process {state.pid}: {e}") from e


@contextlib.contextmanager
def _opened(pid: int, number: int) -> Generator[int, None, None]:
    """Open the file to which process `pid` writes its stacks, which is descriptor `number` of that process.

    Raise NoStacksError if that descriptor now belongs to another file, because the rank's script has reused it.
    """
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(_FILE):
        raise NoStacksError("it has closed the file for its stacks")
    file = os.open(path, os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def _written(file: int, ends_at: float, within_s: float) -> str:
    """Return the content of the file with the stacks once it stops growing, or at the time `ends_at`.

    Raise NoStacksError if the file is then still empty. The message contains the time limit `within_s`.
    """
    size, rests_at = 0, ends_at
    while (now := time.monotonic()) < min(ends_at, rests_at):
        if (grown := os.fstat(file).st_size) > size:
            size, rests_at = grown, now + _REST_S
        time.sleep(_POLL_S)
    if not size:
        raise NoStacksError(f"its handler has written nothing within {within_s:g} s")
    return os.pread(file, min(size, _MOST_BYTES), 0).decode(errors="replace")


STACKS_WITHIN_S = 2.0
PROBE_TIMEOUT_S = 2.5  # including slow reads of /proc on a busy host
OUTPUT_WITHIN_S = 2.0

ELSEWHERE = "process: it runs on another host or in another pid namespace than its manager"
NO_OUTPUT = "output: only `lighthouse-manager run` keeps it"

# Arguments: the rank's hello, which describes its process, and whether the process runs on this host.
ProbeProcess = Callable[[WatchHello, bool], Coroutine[Any, Any, ProcessSnapshot]]


async def probe_alone(request: WatchHello, is_here: bool) -> ProcessSnapshot:
    """Inspect the process of a rank that was started without a supervisor, so its output is not available.

    `is_here` is True if the process runs on this host. If not, return only the reasons why evidence is missing.
    """
    outside = await probe(request) if is_here else ProcessSnapshot(missing=(ELSEWHERE,))
    return replace(outside, missing=(*outside.missing, NO_OUTPUT))


async def probe_with_output(request: WatchHello, lines: Awaitable[tuple[str, ...] | None]) -> ProcessSnapshot:
    """Inspect a rank's process, and add the last lines of its output.

    Awaiting `lines` returns these lines, or None if this supervisor does not run the rank.
    """
    async with asyncio.TaskGroup() as both:
        seeing = both.create_task(probe(request))
        reading = both.create_task(_last(lines))
    outside, (output, missing) = seeing.result(), reading.result()
    return replace(outside, output=output, missing=(*outside.missing, *missing))


async def probe(request: WatchHello) -> ProcessSnapshot:
    """Read the state of a rank's process on this host. If `request` contains an offer, also take its stacks.

    After PROBE_TIMEOUT_S, return why the evidence is missing. The thread that reads /proc may then continue forever,
    but it does not delay the exit of this process.
    """
    offer = request.offer or EvidenceOffer()
    probing = start_read("evidence", lambda: _probe(request.pid, request.started, offer))
    try:
        return await asyncio.wait_for(asyncio.wrap_future(probing), PROBE_TIMEOUT_S)
    except TimeoutError:
        late = f"/proc has not answered within {PROBE_TIMEOUT_S:g} s"
        return ProcessSnapshot(missing=(f"stacks: {late}", f"process: {late}"))


def _probe(pid: int, started: int, offer: EvidenceOffer) -> ProcessSnapshot:
    with process_descriptor(pid, started) as descriptor:
        if descriptor is None:
            return ProcessSnapshot(missing=(f"stacks: process {pid} has ended", f"process: {pid} has ended"))
        try:
            state = read_process(pid)
        except OSError as e:
            return ProcessSnapshot(missing=(f"stacks: /proc/{pid} cannot be read", f"process: {e}"))
        try:
            stacks, missing = take_stacks(descriptor, state, offer, STACKS_WITHIN_S), ()
        except NoStacksError as e:
            stacks, missing = "", (f"stacks: {e}",)
    return ProcessSnapshot(stacks, str(state), missing=missing, is_stopped=state.is_stopped)


async def _last(lines: Awaitable[tuple[str, ...] | None]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (output, reasons): the last lines of a rank's output, or the reason why there are none."""
    try:
        async with asyncio.timeout(OUTPUT_WITHIN_S):
            output = await lines
    except TimeoutError:
        return (), (f"output: its supervisor has not answered within {OUTPUT_WITHIN_S:g} s",)
    return ((), ("output: the supervisor does not run this process",)) if output is None else (output, ())


# -- collector

log = logging.getLogger(__name__)

ANSWERED_WITHIN_S = 3.0
# A message that arrives within this time after the request may have been sent before the rank received the request.
UNDER_WAY_S = 1.0
UNREAD_S = 0.1  # time to read messages that arrived while this process was busy


class EvidenceCollector:
    """Collects evidence about one group's ranks, and passes it to `send`.

    `probe` inspects a rank's process, even if that process does not answer.
    """

    def __init__(
        self, group_world_size: int, send: Callable[[session.ToLighthouse], None], probe: ProbeProcess = probe_alone
    ) -> None:
        self._size = group_world_size
        self._send = send
        self._probe_process = probe
        self._clock = asyncio.get_running_loop().time
        self._newest: dict[int, Watch] = {}  # by rank; kept after the watch ends, as the process may still exist
        self._numbers = itertools.count(1)
        self._asked: dict[tuple[Watch, int], asyncio.Future[SelfReport]] = {}  # keyed by watch and request number
        self._under_way: dict[int, asyncio.Task[RankEvidence]] = {}
        self._answers: set[asyncio.Task[None]] = set()

    def add_watch(self, watch: Watch) -> None:
        self._newest[watch.hello.group_rank] = watch

    def drop_watch(self, watch: Watch) -> None:
        for (asked, _), answer in self._asked.items():
            if asked is watch and not answer.done():
                answer.set_exception(ConnectionError("its watch has ended"))

    def take_self_report(self, watch: Watch, own: SelfReport) -> None:
        answer = self._asked.get((watch, own.number))
        if answer is not None and not answer.done():
            answer.set_result(own)

    def collect_evidence(self, request: session.EvidenceRequest, view: Callable[[], GroupView]) -> None:
        """Collect evidence in the background, and send each rank's evidence as soon as it is complete.

        Then send the progress of the ranks, which `view` returns. Concurrent requests share the inspection of a rank.
        """
        task = start_part(self._answer_request(request, view), "a collection of evidence", None)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def close(self) -> None:
        for task in (*self._answers, *self._under_way.values()):
            task.cancel()

    async def _answer_request(self, request: session.EvidenceRequest, view: Callable[[], GroupView]) -> None:
        wanted = dict.fromkeys(request.group_ranks or range(self._size))
        probes = [self._probe(rank) for rank in wanted]
        for found in asyncio.as_completed([asyncio.shield(probe) for probe in probes]):
            self._send(session.Evidence(request.number, fit_evidence(await found, len(wanted))))
        seen = view()
        self._send(session.EvidenceDone(request.number, seen if seen.ranks else None))

    def _probe(self, group_rank: int) -> asyncio.Task[RankEvidence]:
        task = self._under_way.get(group_rank)
        if task is None:
            task = self._under_way[group_rank] = asyncio.create_task(self._gather_in_time(group_rank))
            task.add_done_callback(lambda _: self._under_way.pop(group_rank))
        return task

    async def _gather_in_time(self, group_rank: int) -> RankEvidence:
        """Gather a rank's evidence. On a timeout or an error, return evidence that contains only the reason."""
        try:
            async with asyncio.timeout(GATHERED_WITHIN_S - 1.0):
                return await self._gather(group_rank)
        except TimeoutError:
            why = f"all evidence: not collected within {GATHERED_WITHIN_S - 1.0:g} s"
        except Exception as e:
            log.exception(
                "cannot collect evidence about rank %d", group_rank, extra=event("evidence_failed", rank=group_rank)
            )
            why = f"all evidence: {e.exceptions[0] if isinstance(e, ExceptionGroup) else e!r}"
        return RankEvidence(group_rank, missing=(why,))

    async def _gather(self, group_rank: int) -> RankEvidence:
        began_at = self._clock()
        watch = self._newest.get(group_rank)
        if watch is None:
            why = "it has not opened a watch" if group_rank < self._size else "the group has no such rank"
            return RankEvidence(group_rank, missing=(f"all evidence: {why}",))
        async with asyncio.TaskGroup() as probes:
            outside = probes.create_task(self._probe_process(replace(watch.hello, offer=None), _is_in_reach(watch)))
            own = probes.create_task(self._self_report(watch, outside))
        found, report = outside.result(), own.result()
        signalled = await self._take_stacks(watch, found, began_at) if not report.stacks else ProcessSnapshot()
        stacks = report.stacks or signalled.stacks
        seen = tuple(why for why in found.missing if not why.startswith("stacks: "))
        missing = (*seen, *report.missing, *signalled.missing)
        return RankEvidence(
            group_rank,
            rank_incarnation=watch.hello.rank_incarnation,
            pid=watch.hello.pid,
            host=watch.hello.hostname,
            stacks=stacks,
            flight_recorder=report.flight_recorder,
            process=found.process,
            output=found.output,
            missing=tuple(why for why in missing if not (stacks and why.startswith("stacks: "))),
            took_s=self._clock() - began_at,
        )

    async def _take_stacks(self, watch: Watch, found: ProcessSnapshot, asked_at: float) -> ProcessSnapshot:
        """Obtain the stacks of a rank that is not answering, by sending its process a signal.

        Send no signal if the process is stopped (see `found`, the result of its inspection). Send none if the rank has
        sent a message since the request at `asked_at`: it can then run Python, and the signal might crash it.
        """
        if not watch.is_open or watch.hello.offer is None:
            return ProcessSnapshot()
        if found.is_stopped:
            return ProcessSnapshot(missing=("stacks: its process is stopped and cannot run a handler",))
        await asyncio.sleep(UNREAD_S)
        if watch.heard_at >= asked_at + UNDER_WAY_S:
            return ProcessSnapshot(missing=("stacks: it is running Python, and a signal might crash it",))
        again = await self._probe_process(watch.hello, _is_in_reach(watch))
        return replace(again, missing=tuple(why for why in again.missing if why.startswith("stacks: ")))

    async def _self_report(self, watch: Watch, outside: "asyncio.Task[ProcessSnapshot]") -> SelfReport:
        """Request the rank's own report of its stacks and its Flight Recorder.

        Stop waiting for the report if the task `outside`, which inspects the process, finds that it is stopped.
        """
        if not watch.is_open:
            return _silent("its watch has ended")
        if watch.hello.offer is None:
            return _silent("its Agent does not answer requests for evidence")
        key = watch, next(self._numbers)
        answer = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            watch.peer.send(EvidenceAsked(key[1]))
            async with asyncio.timeout(ANSWERED_WITHIN_S):
                await asyncio.wait((answer, outside), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done() and outside.result().is_stopped:
                    return SelfReport(0, missing=("Flight Recorder: its process is stopped",))
                return await answer
        except TimeoutError:
            return _silent(f"no answer within {ANSWERED_WITHIN_S:g} s; something prevents it from running Python")
        except ConnectionError as e:
            return _silent(str(e))
        finally:
            del self._asked[key]


def _is_in_reach(watch: Watch) -> bool:
    """Return whether the rank's process runs on this host and in this pid namespace, and has reported its pid."""
    return watch.is_local and watch.hello.pid > 0


def _silent(why: str) -> SelfReport:
    return SelfReport(0, missing=(f"stacks: {why}", f"Flight Recorder: {why}"))
