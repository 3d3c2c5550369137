"""HTTP handlers of the dashboard's actions. Each calls the handler of the corresponding RPC.

Actions that change a job are recorded in the audit log.
"""

from collections.abc import Mapping
from dataclasses import replace

from lighthouse.server.services import IncidentService, LighthouseService, RunService
from lighthouse_protocol.limits import JOB_METADATA_KEY, RUN_METADATA_KEY
from lighthouse_protocol.messages.incident import gathered_document
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.pb.extensions import run_pb2
from lighthouse_runtime.security.access import Audit
from lighthouse_runtime.server.grpc_server import Call
from lighthouse_runtime.web.control import Act, Order


def page_acts(
    quorums: LighthouseService, runs: RunService, incidents: IncidentService, audit: Audit
) -> Mapping[str, Act]:
    """Return the handlers of the dashboard's actions, by method and path."""

    async def kill(order: Order, call: Call) -> Mapping[str, object]:
        request = lighthouse_pb2.LighthouseKillRequest(job=order.job, replica_id=order.replica_id, msg=order.reason)
        await quorums.kill(request, call)
        return {"job": order.job, "replica_id": order.replica_id, "killed": True}

    async def drain(order: Order, call: Call) -> Mapping[str, object]:
        request = lighthouse_pb2.LighthouseDrainRequest(job=order.job, replica_id=order.replica_id, msg=order.reason)
        await quorums.drain(request, call)
        return {"job": order.job, "replica_id": order.replica_id, "draining": True}

    async def stop(order: Order, call: Call) -> Mapping[str, object]:
        await runs.stop_run(run_pb2.StopRunRequest(reason=order.reason), _of_run(order, call))
        return {"job": order.job, "run": order.run, "stopped": True}

    async def resume(order: Order, call: Call) -> Mapping[str, object]:
        await runs.resume_run(run_pb2.ResumeRunRequest(), _of_run(order, call))
        return {"job": order.job, "run": order.run, "resumed": True}

    async def stacks(order: Order, call: Call) -> Mapping[str, object]:
        ranks = [order.replica_id] if order.replica_id else []
        return gathered_document(await incidents.gather(order.job, ranks, call))

    acts = {"POST /kill": kill, "POST /drain": drain, "POST /stop": stop, "POST /resume": resume}
    return {"POST /stacks": stacks, **{route: _audited(route, act, audit) for route, act in acts.items()}}


def _audited(route: str, act: Act, audit: Audit) -> Act:
    async def audited(order: Order, call: Call) -> Mapping[str, object]:
        on = f"run={order.run}" if order.run else f"replica_id={order.replica_id}"
        target = f"job={order.job}, {on}, msg={order.reason}"
        with audit.action(call.principal, call.caller, route, target):
            return await act(order, call)

    return audited


def _of_run(order: Order, call: Call) -> Call:
    """Return a copy of `call` whose metadata names the job and run of `order`, as RPC handlers require."""
    return replace(call, metadata={**call.metadata, JOB_METADATA_KEY: order.job, RUN_METADATA_KEY: order.run})
