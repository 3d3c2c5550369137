"""Calls without our clients: what any program in any language may send."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from tests.processes import http_json

_MOMENTS = {"now_unix_s", "pace", "uptime_s", "quorum_age_s", "heartbeat_age_s", "explanation"}


def call(
    address: str,
    path: str,
    request: Message | bytes,
    answer: type[Message] | None = None,
    *,
    timeout_s: float | None = 30.0,
    metadata: Sequence[tuple[str, str]] = (),
) -> Any:
    """The answer, as `answer` or as bytes. Raises grpc.RpcError."""
    body = request if isinstance(request, bytes) else request.SerializeToString()
    with grpc.insecure_channel(address) as channel:
        raw = channel.unary_unary(path)(body, timeout=timeout_s, metadata=metadata)
    return answer.FromString(raw) if answer is not None else raw


def refused(*arguments: Any, **more: Any) -> tuple[grpc.StatusCode, str]:
    """(status, details) of a call that must be refused."""
    try:
        answer = call(*arguments, **more)
    except grpc.RpcError as e:
        return e.code(), e.details()
    raise AssertionError(f"it was answered: {answer!r}")


def without_moments(status: Any) -> Any:
    """A status document, but for what changes with the time."""
    if isinstance(status, dict):
        return {name: without_moments(value) for name, value in status.items() if name not in _MOMENTS}
    return [without_moments(item) for item in status] if isinstance(status, list) else status


def snapshot(daemon: Any) -> Any:
    return without_moments(http_json(daemon.http + "/status"))


def member(replica_id: str = "a", **fields: Any) -> lighthouse_pb2.LighthouseQuorumRequest:
    """A request of the documented lighthouse."""
    usual: dict[str, Any] = {"address": "10.0.0.1:1", "store_address": "10.0.0.1:2", "step": 5, "world_size": 2}
    return lighthouse_pb2.LighthouseQuorumRequest(
        requester=lighthouse_pb2.QuorumMember(replica_id=replica_id, **(usual | fields))
    )


def rank(group_rank: int = 0, step: int = 10, **fields: Any) -> manager_pb2.ManagerQuorumRequest:
    """A request of the documented manager."""
    return manager_pb2.ManagerQuorumRequest(rank=group_rank, step=step, **fields)


def check_health_and_reflection(address: str, native: ServiceDescriptor, torchft: str) -> None:
    """Both forms of the service, and the bare one, serve; what is reflected is what the .proto file has."""
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", native.full_name, native.name, torchft):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as e:
            health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=10)
        assert e.value.code() is grpc.StatusCode.NOT_FOUND
        reflected = ProtoReflectionDescriptorDatabase(channel)
        assert {native.full_name, torchft, "grpc.health.v1.Health"} <= set(reflected.get_services())
        found = DescriptorPool(reflected).FindServiceByName(native.full_name)
        assert [method.name for method in found.methods] == [method.name for method in native.methods]
