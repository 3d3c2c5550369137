"""The load: many replica groups in one process, one connection each, that all ask for the same quorum.

It costs less than the servers that it loads: requests are built before the clock starts, of the answers (alike for
everybody) one is parsed after it has stopped, and all others are only measured.
"""

import asyncio
import functools
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any

import grpc.aio
import uvloop

from benchmarks.support.line_protocol import answer_orders
from lighthouse_protocol.limits import MAX_RESPONSE_BYTES
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2

CONNECTS_AT_ONCE = 50
TIMEOUT_S = 60.0
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
]


@dataclass(frozen=True, slots=True)
class Wire:
    path: str
    messages: Any

    def request(self, **member: Any) -> bytes:
        requester = self.messages.QuorumMember(**member)
        return self.messages.LighthouseQuorumRequest(requester=requester).SerializeToString()

    def participants(self, answer: bytes) -> int:
        return len(self.messages.LighthouseQuorumResponse.FromString(answer).quorum.participants)


WIRES = {
    "torchft": Wire("/torchft.LighthouseService/Quorum", torchft_pb2),
    "lighthouse.v1": Wire("/lighthouse.v1.LighthouseService/Quorum", lighthouse_pb2),
}


class Crowd:
    def __init__(self, wire: Wire, address: str, size: int) -> None:
        self._wire = wire
        self._step = 0
        self._ids = [_new_id(i) for i in range(size)]
        self._channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(size)]
        self._asks = [channel.unary_unary(wire.path) for channel in self._channels]

    async def connect(self) -> None:
        for i in range(0, len(self._channels), CONNECTS_AT_ONCE):
            await asyncio.gather(*(channel.channel_ready() for channel in self._channels[i : i + CONNECTS_AT_ONCE]))

    async def round(self, changes: bool) -> float:
        """Seconds from the first request to the last answer. With `changes` one group comes back anew."""
        if changes:
            self._ids[0] = _new_id(0)
        self._step += 1
        requests = [self._wire.request(**self._member(i)) for i in range(len(self._ids))]
        began_at = time.perf_counter()
        calls = (ask(body, timeout=TIMEOUT_S) for ask, body in zip(self._asks, requests, strict=True))
        answers: list[bytes] = await asyncio.gather(*calls)
        wall_s = time.perf_counter() - began_at
        self._check(answers)
        return wall_s

    def _member(self, i: int) -> dict[str, Any]:
        host = f"10.20.{i // 250}.{i % 250 + 1}"
        return {
            "replica_id": self._ids[i],
            "address": f"http://{host}:29512",
            "store_address": f"{host}:{30000 + i}",
            "step": self._step,
            "world_size": 8,
        }

    def _check(self, answers: list[bytes]) -> None:
        found = self._wire.participants(answers[0])
        if found != len(self._ids) or len({len(answer) for answer in answers}) != 1:
            raise RuntimeError(f"a quorum of {found}; {len(self._ids)} have asked")


def _new_id(i: int) -> str:
    return f"replica_group_{i}:{uuid.uuid4()}"


async def _connected(wire: Wire, address: str, size: int) -> Crowd:
    crowd = Crowd(wire, address, size)
    await crowd.connect()
    return crowd


def _rounds(runner: asyncio.Runner, crowd: Crowd, *, rounds: int, changes: bool) -> dict[str, Any]:
    began_at = time.process_time()
    wall_s = [runner.run(crowd.round(changes)) for _ in range(rounds)]
    return {"wall_s": wall_s, "cpu_s": time.process_time() - began_at}


def main() -> None:
    wire, address, size = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        crowd = runner.run(_connected(WIRES[wire], address, int(size)))
        print("connected", flush=True)
        answer_orders(functools.partial(_rounds, runner, crowd))


if __name__ == "__main__":
    main()
