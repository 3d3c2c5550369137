"""The codecs of messages that unary calls carry, or several streams."""

from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.evidence import RankEvidence
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentSummary
from lighthouse_protocol.messages.membership import Distrust, World
from lighthouse_protocol.messages.run import Keys
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_protocol.messages.status import LighthouseStatus, ManagerStatus
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.extensions import evidence_pb2, incident_pb2, refusal_pb2, run_pb2
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.wire.codec import by_hand, compiled
from lighthouse_protocol.wire.status_codes import kind_of, refusal_of


def _write_refusal(error: LighthouseError) -> refusal_pb2.Refusal:
    return refusal_pb2.Refusal(kind=kind_of(error), text=cut_reason(str(error)))


def _read_refusal(message: refusal_pb2.Refusal) -> LighthouseError:
    return refusal_of(message.kind, message.text)


REFUSAL = by_hand(LighthouseError, refusal_pb2.Refusal, _write_refusal, _read_refusal)
WORLD = compiled(World, lighthouse_pb2.World)
DISTRUST = compiled(Distrust, lighthouse_pb2.Distrust)
RANK_EVIDENCE = compiled(RankEvidence, evidence_pb2.RankEvidence)
INCIDENT_SUMMARY = compiled(IncidentSummary, incident_pb2.IncidentSummary)
INCIDENT = compiled(Incident, incident_pb2.Incident)
GATHERED = compiled(Gathered, incident_pb2.StacksResponse)
LIGHTHOUSE_STATUS = compiled(LighthouseStatus, lighthouse_pb2.LighthouseStatusResponse)
MANAGER_STATUS = compiled(ManagerStatus, manager_pb2.ManagerStatusResponse)
RUN_STATUS = compiled(RunStatus, run_pb2.RunStatus)
KEYS = compiled(Keys, run_pb2.GetKeysResponse)
