"""Collects evidence of what each rank is doing, at the request of the lighthouse.

All ranks are queried in parallel, each with a fixed time limit. A rank that can still run Python answers with its
stacks and its latest collectives. If its process is on this host, it is also inspected from outside
(process_probe.py): its state always, and its Python stacks by a signal if the rank does not answer. Other ranks do not
receive the signal, because it may crash a process that is running Python. Missing evidence is reported with the reason.
A rank whose watch has closed is inspected as well, because its process may still exist, for example stopped by a
signal.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.incident import (
    GATHERED_WITHIN_S,
    EvidenceAsked,
    ProcessSnapshot,
    RankEvidence,
    SelfReport,
    fit_evidence,
)
from lighthouse_protocol.messages.progress import GroupView
from lighthouse_runtime.log_event import event
from manager.evidence.process_probe import ProbeProcess, probe_alone
from manager.group.driver import Watch

log = logging.getLogger(__name__)

ANSWERED_WITHIN_S = 3.0
# A message that arrives within this time after the request may have been sent before the rank received the request.
UNDER_WAY_S = 1.0
UNREAD_S = 0.1  # time to read messages that arrived while this process was busy


class EvidenceCollector:
    """Collects and sends the evidence of one group.

    Args:
        group_world_size: Number of ranks in the group.
        send: Sends a message to the lighthouse.
        probe: Inspects a rank's process from outside, on the host where it runs.
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

    def opened(self, watch: Watch) -> None:
        self._newest[watch.hello.group_rank] = watch

    def ended(self, watch: Watch) -> None:
        for (asked, _), answer in self._asked.items():
            if asked is watch and not answer.done():
                answer.set_exception(ConnectionError("its watch has ended"))

    def answered(self, watch: Watch, own: SelfReport) -> None:
        answer = self._asked.get((watch, own.number))
        if answer is not None and not answer.done():
            answer.set_result(own)

    def collect(self, request: session.EvidenceRequest, view: Callable[[], GroupView]) -> None:
        """Send each rank's evidence as soon as it is found, then the progress. Concurrent requests share the work."""
        task = asyncio.create_task(self._answer_request(request, view), name="evidence")
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
            why = f"all of it: not found within {GATHERED_WITHIN_S - 1.0:g} s"
        except Exception as e:
            log.exception(
                "cannot find out what rank %d is doing", group_rank, extra=event("evidence_failed", rank=group_rank)
            )
            why = f"all of it: {e.exceptions[0] if isinstance(e, ExceptionGroup) else e!r}"
        return RankEvidence(group_rank, missing=(why,))

    async def _gather(self, group_rank: int) -> RankEvidence:
        began_at = self._clock()
        watch = self._newest.get(group_rank)
        if watch is None:
            why = "all of it: it has opened no watch" if group_rank < self._size else "all of it: the group is smaller"
            return RankEvidence(group_rank, missing=(why,))
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
        """Add the stacks of a rank that does not answer, by sending its process a signal."""
        if not watch.is_open or watch.hello.offer is None:
            return ProcessSnapshot()
        if found.is_stopped:
            return ProcessSnapshot(missing=("stacks: its process is stopped, and runs no handler",))
        await asyncio.sleep(UNREAD_S)
        if watch.heard_at >= asked_at + UNDER_WAY_S:
            return ProcessSnapshot(missing=("stacks: it runs Python, so that a signal might crash it",))
        again = await self._probe_process(watch.hello, _is_in_reach(watch))
        return replace(again, missing=tuple(why for why in again.missing if why.startswith("stacks: ")))

    async def _self_report(self, watch: Watch, outside: "asyncio.Task[ProcessSnapshot]") -> SelfReport:
        """Request the rank's own report. Do not wait for it if the process turns out to be stopped."""
        if not watch.is_open:
            return _silent("its watch has ended")
        if watch.hello.offer is None:
            return _silent("its agent takes no questions")
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
            return _silent(f"no answer within {ANSWERED_WITHIN_S:g} s; something keeps it from running Python")
        except ConnectionError as e:
            return _silent(str(e))
        finally:
            del self._asked[key]


def _is_in_reach(watch: Watch) -> bool:
    """Return whether the process runs on this host, in a pid namespace in which its pid is valid."""
    return watch.is_local and watch.hello.pid > 0


def _silent(why: str) -> SelfReport:
    return SelfReport(0, missing=(f"stacks: {why}", f"Flight Recorder: {why}"))
