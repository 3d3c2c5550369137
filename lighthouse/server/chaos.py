"""Server side of `lighthouse chaos`: sends fault orders to managers, and records each fault as an incident.

A fault ends with the call that injects it, even when the caller cancels the call or loses its connection. All faults
are refused unless the lighthouse was started with --allow-chaos.
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping

from lighthouse.job.registry import JobRegistry
from lighthouse.server.services import job_of, live_member
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.messages.chaos import FaultKind, FaultReport
from lighthouse_protocol.pb.extensions import chaos_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted, Unreachable, WrongState
from lighthouse_protocol.wire.codec import FAULT_ORDER
from lighthouse_runtime.log_event import event
from lighthouse_runtime.server.grpc_server import Call, Entry, FutureReply, Method

log = logging.getLogger(__name__)

REPORTED_WITHIN_S = 5.0
# The report of a killed rank's loss arrives after the kill, and must belong to the incident of the kill.
MIN_HELD_S = 2.0


class ChaosService:
    """Serves the RPC Inject, with which `lighthouse chaos` injects a fault into a replica group."""

    def __init__(self, jobs: JobRegistry, *, is_allowed: bool) -> None:
        self._jobs = jobs
        self._is_allowed = is_allowed
        self._numbers = itertools.count(1)

    def methods(self) -> Mapping[str, Entry]:
        return {"Inject": Method(pb.InjectRequest, self.inject)}

    async def inject(self, request: pb.InjectRequest, call: Call) -> pb.InjectResponse:
        if not self._is_allowed:
            raise NotPermitted("this lighthouse was started without --allow-chaos")
        if request.kind not in set(FaultKind):
            raise InvalidRequest(f"{request.kind!r} is not one of {', '.join(FaultKind)}", field="kind")
        number = next(self._numbers)
        rank = request.group_rank if request.HasField("group_rank") else None
        # Writing a FaultOrder would cap a length that has to be refused.
        fault = pb.FaultOrder(
            number=number, kind=request.kind, group_rank=rank, seconds=request.seconds, delay_s=request.delay_s
        )
        order = FAULT_ORDER.read(fault)
        order.check_limits()
        driver = self._jobs.find_job(job_of(call, request.job, check_name(request.replica_id)))
        member = live_member(driver, request.replica_id)
        name, reply, incident = member.replica_id, FutureReply[FaultReport](), ""
        try:
            if not driver.order_fault(member, order, reply):
                raise WrongState(f"{name} has no session with this lighthouse, so it cannot receive the fault")
            try:
                report = await asyncio.wait_for(reply.value, REPORTED_WITHIN_S)
            except TimeoutError:
                raise Unreachable(
                    f"{name} did not confirm the fault within {REPORTED_WITHIN_S:g} s; managers of older versions do "
                    "not support faults"
                ) from None
            if report.error is not None:
                raise report.error
            if not order.seconds and order.kind not in (FaultKind.KILL, FaultKind.OOM):
                return pb.InjectResponse()  # the caller only asks whether faults are allowed
            target = name if rank is None else f"{name}/{rank}"
            text = f"{order.kind} {target}" + (f" for {order.seconds:.3g} s" if order.seconds else "")
            fields = event("chaos", job=driver.job, kind=order.kind, target=target, peer=call.caller)
            log.warning("lighthouse chaos by %s: %s", call.caller, text, extra=fields)
            incident = driver.incidents.open_fault(name, text, target, report.step)
            await asyncio.sleep(max(order.seconds, MIN_HELD_S))
            return pb.InjectResponse(incident=incident)
        finally:
            driver.cancel_fault(number)
            if incident:
                driver.incidents.end_fault(incident)
