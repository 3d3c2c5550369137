"""What a rank's process is doing, seen from outside on its host: its stacks by a signal, the rest by /proc.

That blocks, and /proc may hang over a sick process: so each look has a thread of its own, and its time.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from lighthouse_protocol.messages.evidence import ProcessSnapshot
from lighthouse_protocol.messages.session import EvidenceOffer, WatchHello
from lighthouse_runtime.process.children import process_descriptor
from manager.evidence.proc_status import read_process
from manager.evidence.python_stacks import NoStacksError, take_stacks

T = TypeVar("T")

STACKS_WITHIN_S = 2.0
LOOK_WITHIN_S = 2.5  # with what /proc costs on a busy host
OUTPUT_WITHIN_S = 2.0

ELSEWHERE = "process: it is on another host, or in another pid namespace, than its manager"
NO_OUTPUT = "output: only `lighthouse-manager run` keeps it"

ProbeProcess = Callable[[WatchHello, bool], Coroutine[Any, Any, ProcessSnapshot]]
"""What a rank says of its process, and whether that is on this host."""


async def look_alone(request: WatchHello, is_here: bool) -> ProcessSnapshot:
    """Without a supervisor."""
    outside = await look(request) if is_here else ProcessSnapshot(missing=(ELSEWHERE,))
    return replace(outside, missing=(*outside.missing, NO_OUTPUT))


async def look_with_output(request: WatchHello, lines: Awaitable[tuple[str, ...] | None]) -> ProcessSnapshot:
    """`lines`: what the rank wrote last; None: its process is none of this supervisor's."""
    async with asyncio.TaskGroup() as both:
        seeing = both.create_task(look(request))
        reading = both.create_task(_last(lines))
    outside, (output, missing) = seeing.result(), reading.result()
    return replace(outside, output=output, missing=(*outside.missing, *missing))


async def look(request: WatchHello) -> ProcessSnapshot:
    """At a process of this host."""
    offer = request.offer or EvidenceOffer()
    try:
        return await _in_thread(lambda: _look(request.pid, request.started, offer), LOOK_WITHIN_S)
    except TimeoutError:
        late = f"/proc has not answered within {LOOK_WITHIN_S:g} s"
        return ProcessSnapshot(missing=(f"stacks: {late}", f"process: {late}"))


def _look(pid: int, started: int, offer: EvidenceOffer) -> ProcessSnapshot:
    with process_descriptor(pid, started) as descriptor:
        if descriptor is None:
            return ProcessSnapshot(missing=(f"stacks: process {pid} has ended", f"process: {pid} has ended"))
        try:
            state = read_process(pid)
        except OSError as e:
            return ProcessSnapshot(missing=(f"stacks: not without /proc/{pid}", f"process: {e}"))
        try:
            stacks, missing = take_stacks(descriptor, state, offer, STACKS_WITHIN_S), ()
        except NoStacksError as e:
            stacks, missing = "", (f"stacks: {e}",)
    return ProcessSnapshot(stacks, str(state), missing=missing, is_stopped=state.is_stopped)


async def _last(lines: Awaitable[tuple[str, ...] | None]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The lines, and why there are none."""
    try:
        async with asyncio.timeout(OUTPUT_WITHIN_S):
            output = await lines
    except TimeoutError:
        return (), (f"output: its keeper has not answered within {OUTPUT_WITHIN_S:g} s",)
    return ((), ("output: its process is none of the supervisor's",)) if output is None else (output, ())


async def _in_thread(work: Callable[[], T], within_s: float) -> T:
    """Raises TimeoutError; the thread then goes on for as long as /proc keeps it, and no end of ours waits for it."""
    done = concurrent.futures.Future[T]()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as e:  # noqa: BLE001  it belongs to the waiter
            done.set_exception(e)

    threading.Thread(target=run, name="evidence", daemon=True).start()
    return await asyncio.wait_for(asyncio.wrap_future(done), within_s)
