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
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.access import changes_state
from lighthouse_runtime.security.access import Audit
from lighthouse_runtime.server.grpc_server import Call
from lighthouse_runtime.web.control import Act, Order


class PageActs:
    def __init__(self, quorums: LighthouseService, runs: RunService, incidents: IncidentService, audit: Audit) -> None:
        self._quorums = quorums
        self._runs = runs
        self._incidents = incidents
        self._audit = audit

    def by_route(self) -> Mapping[str, Act]:
        acts: dict[str, Act] = {
            "POST /kill": self._kill,
            "POST /drain": self._drain,
            "POST /stop": self._stop,
            "POST /resume": self._resume,
            "POST /stacks": self._stacks,
        }
        return {route: self._audited(route, act) if changes_state(route) else act for route, act in acts.items()}

    def _audited(self, route: str, act: Act) -> Act:
        async def audited(order: Order, call: Call) -> Mapping[str, object]:
            target = f"run={order.run}" if order.run else f"replica_id={order.replica_id}"
            result = "failed"
            try:
                answer = await act(order, call)
                result = "done"
            except LighthouseError as e:
                result = f"refused: {e}"
                raise
            finally:
                what = f"job={order.job}, {target}, msg={order.reason}"
                self._audit.act(call.principal, call.caller, route, what, result)
            return answer

        return audited

    async def _kill(self, order: Order, call: Call) -> Mapping[str, object]:
        request = lighthouse_pb2.LighthouseKillRequest(job=order.job, replica_id=order.replica_id, msg=order.reason)
        await self._quorums.kill(request, call)
        return {"job": order.job, "replica_id": order.replica_id, "killed": True}

    async def _drain(self, order: Order, call: Call) -> Mapping[str, object]:
        request = lighthouse_pb2.LighthouseDrainRequest(job=order.job, replica_id=order.replica_id, msg=order.reason)
        await self._quorums.drain(request, call)
        return {"job": order.job, "replica_id": order.replica_id, "draining": True}

    async def _stop(self, order: Order, call: Call) -> Mapping[str, object]:
        await self._runs.stop_run(run_pb2.StopRunRequest(reason=order.reason), _of_run(order, call))
        return {"job": order.job, "run": order.run, "stopped": True}

    async def _resume(self, order: Order, call: Call) -> Mapping[str, object]:
        await self._runs.resume_run(run_pb2.ResumeRunRequest(), _of_run(order, call))
        return {"job": order.job, "run": order.run, "resumed": True}

    async def _stacks(self, order: Order, call: Call) -> Mapping[str, object]:
        ranks = [order.replica_id] if order.replica_id else []
        return gathered_document(await self._incidents.gather(order.job, ranks, call))


def _of_run(order: Order, call: Call) -> Call:
    """Return a call whose metadata names the job and the run, as the handlers of RPCs require."""
    return replace(call, metadata={**call.metadata, JOB_METADATA_KEY: order.job, RUN_METADATA_KEY: order.run})
