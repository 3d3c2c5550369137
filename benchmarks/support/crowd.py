"""Load generator: many replica groups in one process, with a connection each, that all request the same quorum.

It uses less CPU than the servers under load. Requests are built before the clock starts. Of the replies, which are the
same for all groups, one is parsed after the clock has stopped, and only the lengths of the others are checked.
"""

import asyncio
import functools
import sys
import time
import uuid
from typing import Any

import grpc.aio
import uvloop

from benchmarks.support.children import answer_orders
from lighthouse_protocol.limits import MAX_RESPONSE_BYTES
from lighthouse_protocol.pb.torchft import torchft_pb2

CONNECTS_AT_ONCE = 50
TIMEOUT_S = 60.0
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
]


PATH = "/torchft.LighthouseService/Quorum"


class Crowd:
    def __init__(self, address: str, size: int) -> None:
        self._step = 0
        self._ids = [f"replica_group_{i}:{uuid.uuid4()}" for i in range(size)]
        self._channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(size)]
        self._asks = [channel.unary_unary(PATH) for channel in self._channels]

    async def connect(self) -> None:
        for i in range(0, len(self._channels), CONNECTS_AT_ONCE):
            await asyncio.gather(*(channel.channel_ready() for channel in self._channels[i : i + CONNECTS_AT_ONCE]))

    async def round(self) -> float:
        """Run one round, and return the seconds from the first request to the last reply."""
        self._step += 1
        requests = [self._request(i) for i in range(len(self._ids))]
        began_at = time.perf_counter()
        calls = (ask(body, timeout=TIMEOUT_S) for ask, body in zip(self._asks, requests, strict=True))
        answers: list[bytes] = await asyncio.gather(*calls)
        wall_s = time.perf_counter() - began_at
        self._check(answers)
        return wall_s

    def _request(self, i: int) -> bytes:
        host = f"10.20.{i // 250}.{i % 250 + 1}"
        requester = torchft_pb2.QuorumMember(
            replica_id=self._ids[i],
            address=f"http://{host}:29512",
            store_address=f"{host}:{30000 + i}",
            step=self._step,
            world_size=8,
        )
        return torchft_pb2.LighthouseQuorumRequest(requester=requester).SerializeToString()

    def _check(self, answers: list[bytes]) -> None:
        found = len(torchft_pb2.LighthouseQuorumResponse.FromString(answers[0]).quorum.participants)
        if found != len(self._ids) or len({len(answer) for answer in answers}) != 1:
            raise RuntimeError(f"a quorum of {found}; {len(self._ids)} have asked")


async def _connected(address: str, size: int) -> Crowd:
    crowd = Crowd(address, size)
    await crowd.connect()
    return crowd


def _rounds(runner: asyncio.Runner, crowd: Crowd, *, rounds: int) -> dict[str, Any]:
    began_at = time.process_time()
    wall_s = [runner.run(crowd.round()) for _ in range(rounds)]
    return {"wall_s": wall_s, "cpu_s": time.process_time() - began_at}


def main() -> None:
    address, size = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        crowd = runner.run(_connected(address, int(size)))
        print("connected", flush=True)
        answer_orders(functools.partial(_rounds, runner, crowd))


if __name__ == "__main__":
    main()
