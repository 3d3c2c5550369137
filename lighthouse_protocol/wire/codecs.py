"""The codecs of messages that several streams and calls carry."""

from lighthouse_protocol.messages.evidence import RankEvidence
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentSummary
from lighthouse_protocol.messages.membership import World
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.pb.extensions import evidence_pb2, incident_pb2
from lighthouse_protocol.wire.codec import compiled

WORLD = compiled(World, lighthouse_pb2.World)
RANK_EVIDENCE = compiled(RankEvidence, evidence_pb2.RankEvidence)
INCIDENT_SUMMARY = compiled(IncidentSummary, incident_pb2.IncidentSummary)
INCIDENT = compiled(Incident, incident_pb2.Incident)
GATHERED = compiled(Gathered, incident_pb2.StacksResponse)
