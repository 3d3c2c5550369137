"""gRPC as a daemon has it: what it starts comes up whatever its streams do, and ranks get none of its settings."""

import pytest

from lighthouse_runtime.process import grpc_environment
from tests.lighthouse_runtime.stream_server import RemoteStreamServer
from tests.processes import Process

STARTING = """
import asyncio, sys
import lighthouse_runtime.process.grpc_environment
import uvloop
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import Hello
from lighthouse_runtime.client.clients import AsyncLighthouseClient

async def main():
    ended = []
    for number in range(100):
        async with AsyncLighthouseClient(sys.argv[1]) as client, client.session() as session:
            session.send(Hello(Participant("a", "1"), secret="known to this manager alone, of this test"))
            opening = asyncio.create_task(anext(session))
            await asyncio.sleep(0.002 * (number % 4))
            ended.append(await (await asyncio.create_subprocess_exec("true")).wait())
            await opening
    print("ended with", set(ended))

uvloop.run(main())
"""


def test_what_is_started_while_streams_open_comes_up():
    """uvloop forks, and gRPC's fork support would abort one child in eleven before it is what was asked for."""
    with RemoteStreamServer() as server, Process(STARTING, [server.address]) as process:
        assert process.wait() == 0, process.log()
        assert "ended with {0}" in process.log(), process.log()


SHOWING = """
import os
from lighthouse_runtime.process import grpc_environment
print("ours", sorted(name for name in os.environ if name.startswith("GRPC_")))
theirs = grpc_environment.without_our_defaults(os.environ)
print("theirs", sorted(f"{name}={value}" for name, value in theirs.items() if name.startswith("GRPC_")))
"""


@pytest.mark.parametrize("given", [{}, {"GRPC_ENABLE_FORK_SUPPORT": "1"}, {"GRPC_VERBOSITY": "INFO"}])
def test_a_rank_gets_what_the_daemon_was_given(given: dict[str, str]):
    with Process(SHOWING, env=given) as process:
        assert process.wait() == 0
        assert f"ours {sorted(grpc_environment.DEFAULTS)}" in process.log()
        assert f"theirs {[f'{name}={value}' for name, value in given.items()]}" in process.log()
