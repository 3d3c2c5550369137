"""A process that uses gRPC forks: neither side is harmed, and a child that would use it, too, is told of the ways."""

from collections.abc import Iterator

import pytest

from tests.lighthouse_runtime.stream_server import RemoteStreamServer
from tests.processes import Lighthouse, Process

SUPPORTED = {"GRPC_ENABLE_FORK_SUPPORT": "1"}


@pytest.fixture
def server() -> Iterator[RemoteStreamServer]:
    with RemoteStreamServer() as process:
        yield process


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse() as process:
        yield process


# -- beside an open stream

WITH_A_STREAM = """
import gc, os, sys, threading, time
import agent_client
from lighthouse_runtime.client.clients import ManagerClient
from lighthouse_protocol.messages.session import WatchHello

client = ManagerClient(sys.argv[1])
watch = client.watch(WatchHello(1, "w"))
next(watch), next(watch)
heard = []

def listen():
    try:
        heard.extend(watch)
    except Exception as e:
        heard.append(e)

threading.Thread(target=listen, daemon=True).start()
child = os.fork()
if child == 0:
    match sys.argv[2]:
        case "opens":
            with client, client.watch(WatchHello(2, "w")) as other:
                next(other), print(next(other))
        case "cancels":
            watch.cancel()
        case "closes":
            client.close()
        case "drops":
            del client, watch
            gc.collect()
    sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(child, 0)
print("child ended with", status)
time.sleep(0.3)
print("parent heard on:", heard)
watch.cancel()
"""


@pytest.mark.parametrize(("child", "env"), [("cancels", {}), ("closes", {}), ("drops", {}), ("opens", SUPPORTED)])
def test_a_fork_harms_neither_side(server: RemoteStreamServer, child: str, env: dict[str, str]):
    with Process(WITH_A_STREAM, [server.address, child], env=env) as process:
        assert process.wait() == 0, process.log()
        assert "child ended with 0" in process.log()
        assert "parent heard on: []" in process.log()


WHILE_STREAMS_OPEN = """
import os, sys, threading, time
import agent_client
from lighthouse_runtime.client.clients import ManagerClient
from lighthouse_protocol.messages.session import WatchHello

heard, children, clients = [], [], []

def listen(watch):
    try:
        heard.extend(watch)
    except Exception as e:
        heard.append(e)

for number in range(60):
    clients.append(ManagerClient(sys.argv[1]))
    watch = clients[-1].watch(WatchHello(1, f"w{number}"))
    threading.Thread(target=listen, args=(watch,), daemon=True).start()
    child = os.fork()
    if child == 0:  # as a data loader's worker: it starts a thread, and works for a while
        thread = threading.Thread(target=time.sleep, args=(0.2,))
        thread.start()
        thread.join()
        os._exit(0)
    children.append(child)
    time.sleep(0.02)
print("children ended with", {os.waitpid(child, 0)[1] for child in children})
print("parent heard", [each for each in heard if isinstance(each, Exception)])
sys.stdout.flush()
os._exit(0)
"""


def test_workers_that_are_forked_while_a_stream_opens_live(server: RemoteStreamServer):
    """gRPC's fork support, which is on by default, starts threads in them: several of these 60 then abort."""
    with Process(WHILE_STREAMS_OPEN, [server.address]) as process:
        assert process.wait() == 0, process.log()
        assert "children ended with {0}" in process.log(), process.log()
        assert "parent heard []" in process.log(), process.log()


# -- a child that uses gRPC itself

USING = """
import os, sys
import agent_client
import grpc
from lighthouse_runtime.client.clients import LighthouseClient
from lighthouse_protocol.refusals import WrongState

client = LighthouseClient(sys.argv[1], job="forked")
if sys.argv[2] == "used":
    client.heartbeat("parent", timeout_s=20)
child = os.fork()
if child == 0:
    try:
        client.heartbeat("child", timeout_s=20)
        grpc.insecure_channel(sys.argv[1]).close()
        print("members", sorted(m.replica_id for m in client.status("forked", timeout_s=20).jobs[0].members))
    except WrongState as e:
        print("refused:", e)
        try:
            grpc.insecure_channel(sys.argv[1])
        except WrongState:
            print("others are refused, too")
    sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(child, 0)
client.heartbeat("parent", timeout_s=20)
client.close()
print("child ended with", status)
"""


@pytest.mark.parametrize(("before", "env"), [("used", SUPPORTED), ("unused", {}), ("unused", SUPPORTED)])
def test_a_child_uses_it(lighthouse: Lighthouse, before: str, env: dict[str, str]):
    with Process(USING, [lighthouse.address, before], env=env) as process:
        assert process.wait() == 0, process.log()
        assert "members" in process.log(), process.log()
        assert "child ended with 0" in process.log()


def test_a_child_of_a_process_that_uses_it_is_refused(lighthouse: Lighthouse):
    """With gRPC alone it would wait there for good, whatever its deadline."""
    with Process(USING, [lighthouse.address, "used"]) as process:
        assert process.wait() == 0, process.log()
        assert "was forked from one that uses gRPC" in process.log(), process.log()
        assert "others are refused, too" in process.log()
        assert "child ended with 0" in process.log()
