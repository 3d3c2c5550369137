"""The RPCs of incidents, and of stacks on demand."""

from collections.abc import Iterable, Mapping

from lighthouse.incidents.registry import IncidentRegistry
from lighthouse.incidents.rules.evidence_round import check_ranks, read_ranks
from lighthouse.quorum.registry import JobRegistry
from lighthouse.server.lookup import job_of, live_member
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.messages.incident import Gathered, Incident
from lighthouse_protocol.pb.extensions import incident_pb2 as pb
from lighthouse_protocol.wire.codecs import GATHERED, INCIDENT, INCIDENT_SUMMARY
from lighthouse_runtime.server.future_reply import FutureReply
from lighthouse_runtime.server.rpc_handler import Call, Entry, Method


class IncidentService:
    def __init__(self, jobs: JobRegistry, registry: IncidentRegistry) -> None:
        self._jobs = jobs
        self._registry = registry

    def methods(self) -> Mapping[str, Entry]:
        return {
            "Incidents": Method(pb.IncidentsRequest, self.incidents),
            "Incident": Method(pb.IncidentRequest, self.incident),
            "Stacks": Method(pb.StacksRequest, self.stacks),
        }

    async def incidents(self, request: pb.IncidentsRequest, _: Call) -> pb.IncidentsResponse:
        job = check_name(request.job, "job") if request.job else ""
        return pb.IncidentsResponse(incidents=map(INCIDENT_SUMMARY.write, self._registry.archive.summaries(job)))

    async def incident(self, request: pb.IncidentRequest, call: Call) -> pb.IncidentResponse:
        return pb.IncidentResponse(incident=INCIDENT.write(self.find(request.id, call)))

    def find(self, name: str, call: Call) -> Incident:
        """Raises UnknownName, and NotPermitted for a caller that is bound to another job."""
        found = self._registry.archive.get(name)
        job_of(call, found.summary.job)
        return found

    async def stacks(self, request: pb.StacksRequest, call: Call) -> pb.StacksResponse:
        return GATHERED.write(await self.gather(request.job, request.ranks, call))

    async def gather(self, job: str, of_ranks: Iterable[str], call: Call) -> Gathered:
        """What `of_ranks` (b/1, or b) do now; of none: all ranks of the quorum. Raises a refusal."""
        driver, ranks = self._jobs.find(job_of(call, job)), read_ranks(of_ranks)
        found: dict[str, tuple[int, ...]] = {}
        for name, of in (ranks or {}).items():
            if (run := driver.run(name)) is not None and driver.member(name) is None:
                check_ranks(name, of, run.machine.generations.terms.world_size)
                found[name] = of
                continue
            member = live_member(driver, check_name(name))
            check_ranks(member.replica_id, of, member.participant.group_world_size if member.participant else 0)
            found[member.replica_id] = of
        reply = FutureReply[Gathered]()
        driver.incidents.gather(found or None, reply)
        return await reply.value
