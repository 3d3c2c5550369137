"""What gRPC's asyncio server costs by itself: once all have asked, they get one answer. Nothing is checked or kept."""

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio
import uvloop

from lighthouse_protocol.pb.torchft import torchft_pb2


class Rounds:
    """Of `size` calls each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._asked = list[bytes]()
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def quorum(self, body: bytes, _: Any) -> bytes:
        answer = self._answer
        self._asked.append(body)
        if len(self._asked) == self._size:
            members = [torchft_pb2.LighthouseQuorumRequest.FromString(asked).requester for asked in self._asked]
            quorum = torchft_pb2.Quorum(quorum_id=1, participants=members)
            answer.set_result(torchft_pb2.LighthouseQuorumResponse(quorum=quorum).SerializeToString())
            self._asked, self._answer = [], asyncio.get_running_loop().create_future()
        return await answer


async def serve(host: str, size: str) -> None:
    server = grpc.aio.server()
    handlers = {"Quorum": grpc.unary_unary_rpc_method_handler(Rounds(int(size)).quorum)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("torchft.LighthouseService", handlers),))
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(*sys.argv[1:]))


if __name__ == "__main__":
    main()
