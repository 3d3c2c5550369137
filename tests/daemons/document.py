"""The user's design document, section 4: its own proto text, compiled here and nowhere else.

A client built from that text, without a package, must be served to the letter.
"""

import re
from dataclasses import dataclass

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, timestamp_pb2

LIGHTHOUSE = """
message QuorumMember {
  string replica_id = 1;
  string address = 2;
  string store_address = 3;
  int64 step = 4;
  uint64 world_size = 5;
}
message Quorum {
  int64 quorum_id = 1;
  repeated QuorumMember participants = 2;
  google.protobuf.Timestamp created = 3;
}
message LighthouseQuorumRequest {
  QuorumMember requester = 1;
}
message LighthouseQuorumResponse {
  Quorum quorum = 1;
}
message LighthouseHeartbeatRequest {
  string replica_id = 1;
}
message LighthouseHeartbeatResponse {}
service LighthouseService {
  rpc Quorum (LighthouseQuorumRequest) returns (LighthouseQuorumResponse);
  rpc Heartbeat (LighthouseHeartbeatRequest) returns
(LighthouseHeartbeatResponse);
}
"""

MANAGER = """
message ManagerQuorumRequest {
 int64 rank = 1;
 int64 step = 2;
 string checkpoint_server_addr = 3;
}
message ManagerQuorumResponse {
 int64 quorum_id = 1;
 string address = 2;
 string store_address = 3;
 // These are information for the replicas which are at the max step.
 int64 max_step = 4;
 optional int64 max_rank = 5;
 int64 max_world_size = 6;
 // These are information for all replicas including behind replicas.
 int64 replica_rank = 7;
 int64 replica_world_size = 8;
 bool heal = 9;
}
message CheckpointAddressRequest {
 int64 rank = 1;
}
message CheckpointAddressResponse {
 string checkpoint_server_address = 1;
}
message ShouldCommitRequest {
 bool should_commit = 1;
 int64 rank = 2;
 int64 step = 3;
}
message ShouldCommitResponse {
 bool should_commit = 1;
}
message KillRequest {
 string msg = 1;
}
message KillResponse {}
service ManagerService {
 rpc Quorum (ManagerQuorumRequest) returns (ManagerQuorumResponse);
 rpc CheckpointAddress(CheckpointAddressRequest) returns
(CheckpointAddressResponse);
 rpc ShouldCommit(ShouldCommitRequest) returns (ShouldCommitResponse);
 rpc Kill(KillRequest) returns (KillResponse);
}
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "bool": _Field.TYPE_BOOL,
}


@dataclass(frozen=True)
class Compiled:
    """Message classes by name, and (request, response) by the method's path, which has no package."""

    messages: dict[str, type[message.Message]]
    methods: dict[str, tuple[type[message.Message], type[message.Message]]]


def compile_text(text: str) -> Compiled:
    """A protoc for the four kinds of line that the document has."""
    file = descriptor_pb2.FileDescriptorProto(name="document.proto", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.DOTALL):
        _fill(file.message_type.add(name=name), body)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    messages = {
        entry.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(entry.name))
        for entry in file.message_type
    }
    methods = {}
    for service, body in re.findall(r"service (\w+) \{(.*?)\n\}", text, re.DOTALL):
        for name, request, answer in re.findall(r"rpc (\w+)\s*\((\w+)\)\s*returns\s*\((\w+)\)", body):
            methods[f"/{service}/{name}"] = (messages[request], messages[answer])
    return Compiled(messages, methods)


def _fill(entry: descriptor_pb2.DescriptorProto, body: str) -> None:
    for label, kind, name, number in re.findall(r"(optional |repeated |)([\w.]+) (\w+) = (\d+);", body):
        field = entry.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type, field.type_name = _Field.TYPE_MESSAGE, "." + kind
        if label == "repeated ":
            field.label = _Field.LABEL_REPEATED
        if label == "optional ":
            field.proto3_optional, field.oneof_index = True, len(entry.oneof_decl)
            entry.oneof_decl.add(name="_" + name)
