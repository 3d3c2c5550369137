"""The manager as a process: its services, its store, its signals, its environment."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lighthouse_protocol import VERSION
from lighthouse_protocol.pb.documented import manager_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_runtime.client.clients import ManagerClient
from tests.daemons import document
from tests.daemons.wire import call, check_health_and_reflection
from tests.processes import (
    LOCALHOST,
    MANAGER_CODE,
    Lighthouse,
    Manager,
    Process,
    eventually,
    http_get,
    http_json,
    run_cli,
)

NOWHERE = f"{LOCALHOST}:1"


@pytest.fixture(scope="module")
def manager(lighthouse: Lighthouse) -> Iterator[Manager]:
    """One for the tests that only look."""
    with Manager(lighthouse.address, "looked-at", "--job", "looked-at") as process:
        eventually(lambda: http_get(process.http + "/readyz")[0] == 200, "a heartbeat was answered")
        yield process


# -- services


@pytest.mark.parametrize("package", ["", "manager.v1."])
def test_a_client_compiled_from_the_documents_text_is_served(lighthouse: Lighthouse, package: str) -> None:
    text = document.compile_text(document.MANAGER)
    assert [path.rpartition("/")[2] for path in text.methods] == [
        "Quorum",
        "CheckpointAddress",
        "ShouldCommit",
        "Kill",
    ]

    def ask(method: str, **fields: Any) -> Any:
        request, answer = text.methods[f"/ManagerService/{method}"]
        return call(process.address, f"/{package}ManagerService/{method}", request(**fields), answer)

    with Manager(lighthouse.address, "a", "--job", f"document{len(package)}", store=f"{LOCALHOST}:7") as process:
        quorum = ask("Quorum", rank=0, step=3, checkpoint_server_addr="http://here")
        said = {field.name: value for field, value in quorum.ListFields()}
        assert said.pop("quorum_id") > 0
        assert said == {
            "address": f"http://{process.address}",
            "store_address": f"{LOCALHOST}:7",
            "max_step": 3,
            "max_rank": 0,
            "max_world_size": 1,
            "replica_world_size": 1,
        }  # replica_rank 0 and heal false are not written
        assert quorum.HasField("max_rank")
        assert ask("CheckpointAddress", rank=0).checkpoint_server_address == "http://here"
        assert ask("ShouldCommit", rank=0, step=3, should_commit=True).should_commit is True
        ask("Kill", msg="as documented")
        assert process.wait() == 1
        assert "as documented" in process.log()


def test_torchfts_service_relays_the_handles_of_every_rank(lighthouse: Lighthouse) -> None:
    with Manager(lighthouse.address, "a", "--job", "handles", ranks=2) as process, ThreadPoolExecutor() as pool:

        def ask(rank: int) -> torchft_pb2.ManagerQuorumResponse:
            asked = {"group_rank": rank, "reconfigure_handle": f"h{rank}", "commit_failures": rank}
            request = torchft_pb2.ManagerQuorumRequest(**asked)
            return call(process.address, "/torchft.ManagerService/Quorum", request, torchft_pb2.ManagerQuorumResponse)

        answers = list(pool.map(ask, range(2)))
    assert [list(answer.reconfigure_handles) for answer in answers] == [["h0"], ["h1"]]
    assert [(answer.commit_failures, list(answer.replica_ids)) for answer in answers] == [(1, ["a"])] * 2


def test_health_and_reflection(manager: Manager) -> None:
    native = manager_pb2.DESCRIPTOR.services_by_name["ManagerService"]
    check_health_and_reflection(manager.address, native, "torchft.ManagerService")


def test_the_http_side(manager: Manager) -> None:
    assert http_get(manager.http + "/livez") == (200, "ok\n")
    assert http_get(manager.http + "/readyz") == (200, "ok\n")
    status = http_json(manager.http + "/status")
    assert (status["version"], status["replica_id"], status["phase"]) == (VERSION, "looked-at", "idle")
    metrics = http_get(manager.http + "/metrics")[1]
    for sample in ("lighthouse_manager_lighthouse_reachable 1", "lighthouse_manager_commits_total 0"):
        assert re.search(rf"^{sample}", metrics, re.MULTILINE)


def test_its_status_verb(manager: Manager) -> None:
    shown = run_cli(MANAGER_CODE, "status", "--manager", manager.address)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "looked-at (1 rank)" in shown.stdout
    nobody = run_cli(MANAGER_CODE, "status", "--manager", NOWHERE)
    assert nobody.returncode == 1
    assert nobody.stderr.startswith(f"Error: {NOWHERE} is unreachable")
    assert len(nobody.stderr.splitlines()) == 1


# -- its end


def test_while_it_stops_its_health_says_so() -> None:
    with (
        Manager(NOWHERE, "a", "--shutdown-timeout", "10m") as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
        next(watch)
        process.signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


STARTER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "serve", "--parent-pid", str(os.getpid()), *sys.argv[2:]])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_the_process_that_started_it() -> None:
    options = ["--lighthouse", NOWHERE, "--replica-id", "a", "--bind", f"{LOCALHOST}:0", "--store", NOWHERE]
    with Process(STARTER, [MANAGER_CODE, *options]) as starter:
        pid = int(starter.wait_for_log(r"child (\d+)")[1])
        starter.wait_for_log("serves on")
        starter.kill()
        try:
            eventually(lambda: not _runs(pid), "the manager has ended")
        finally:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
        assert "manager stopped" in starter.log()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_announces_its_address_to_its_starter() -> None:
    read, write = os.pipe()
    with Manager(NOWHERE, "a", "--announce-fd", str(write), pass_fds=(write,)) as process:
        os.close(write)
        with open(read) as pipe:
            assert pipe.read() == process.address + "\n"


# -- the environment


@pytest.mark.parametrize(
    ("env", "job", "name", "ranks"),
    [
        ({"TORCHFT_LIGHTHOUSE": "http://{}", "REPLICA_GROUP_ID": "3", "WORLD_SIZE": "4"}, "default", "3", 4),
        (
            {
                "LIGHTHOUSE_MANAGER_LIGHTHOUSE": "{}",
                "LIGHTHOUSE_ADDRESS": NOWHERE,
                "TORCHFT_LIGHTHOUSE": f"http://{NOWHERE}",
                "LIGHTHOUSE_MANAGER_REPLICA_ID": "ours",
                "REPLICA_GROUP_ID": "torchfts",
                "LIGHTHOUSE_MANAGER_GROUP_WORLD_SIZE": "2",
                "WORLD_SIZE": "4",
                "LIGHTHOUSE_JOB": "j",
            },
            "j",
            "ours",
            2,
        ),
    ],
)
def test_it_is_set_up_by_environment_variables(
    lighthouse: Lighthouse, env: dict[str, str], job: str, name: str, ranks: int
) -> None:
    chosen = {key: value.format(lighthouse.address) for key, value in env.items()}
    with Manager(None, None, ranks=None, env=chosen) as process, ManagerClient(process.address) as client:
        status = client.status()
        assert (status.job, status.replica_id, status.group_world_size) == (job, name, ranks)
        eventually(lambda: client.status().lighthouse_reachable, "a heartbeat was answered")


# -- the store


STORE_CLIENT = """
import sys
from torch.distributed import TCPStore
host, _, port = sys.argv[1].rpartition(":")
store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
store.set("key", "value")
print("read", store.get("key").decode(), flush=True)
"""


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_auto_hosts_a_store_and_its_end_is_the_managers() -> None:
    pytest.importorskip("torch")
    with Manager(NOWHERE, store="auto") as process:
        assert process.store_address.startswith(f"{LOCALHOST}:")
        with Process(STORE_CLIENT, [process.store_address]) as client:
            assert (client.wait(), "read value" in client.log()) == (0, True)
        with ManagerClient(process.address) as rank:
            assert rank.status().store_address == process.store_address
        (store,) = _children(process.pid)
        os.kill(store, signal.SIGKILL)
        assert process.wait() == 1
        assert "the store process ended with status -9; the manager ends with it" in process.log()


@pytest.fixture
def interpreter(tmp_path: Path) -> Any:
    """A program that stands for --store-python."""

    def make(script: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_the_store_ends_with_a_manager_that_is_killed(interpreter: Any) -> None:
    # program.py without torch: the manager's own script, given a module of that name
    fake = 'import sys, types\nstore = types.SimpleNamespace(port=4711)\nd = types.ModuleType("torch.distributed")\n'
    fake += "d.TCPStore = lambda *a, **k: store\n"
    fake += 'sys.modules["torch"], sys.modules["torch.distributed"] = types.ModuleType("torch"), d\n'
    fake += 'import runpy\nrunpy.run_path(sys.argv[1], run_name="__main__")'
    script = Path(interpreter("")).with_name("fake.py")
    script.write_text(fake.replace("sys.argv[1]", "sys.argv.pop(1)"))
    python = interpreter(f'exec {sys.executable} -I -S {script} "$@"')
    for end in ("stop", "kill"):
        with Manager(NOWHERE, "a", "--store-python", python, store="auto") as process:
            assert process.store_address == f"{LOCALHOST}:4711"
            (store,) = _children(process.pid)
            assert getattr(process, end)() in (0, None)
            eventually(lambda store=store: not _runs(store), "the store has ended")


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (f'exec {sys.executable} -I -S "$@"', "--store: auto: no torch in .*: No module named 'torch'"),
        ("exit 7", "--store: auto: the process exited"),
        ("echo store not-a-port", "--store: auto: store not-a-port"),
    ],
)
def test_an_interpreter_without_torch_is_refused_with_the_remedy(interpreter: Any, script: str, complaint: str) -> None:
    process = Manager(NOWHERE, "a", "--store-python", interpreter(script), store="auto")
    _is_refused(process, complaint)


def test_an_interpreter_that_is_not_there_is_refused_with_the_remedy() -> None:
    process = Manager(NOWHERE, "a", "--store-python", "/no/such/python", store="auto")
    _is_refused(process, "--store-python: cannot run /no/such/python: No such file or directory")


def test_its_own_interpreter_without_torch_is_refused_at_once() -> None:
    code = "import sys; sys.modules['torch'] = None\n" + MANAGER_CODE
    _is_refused(Manager(NOWHERE, store="auto", code=code), "--store: auto needs torch, and .* has none")


def _is_refused(process: Manager, complaint: str) -> None:
    process.launch()
    try:
        assert process.wait() == 1
        said = process.log()
    finally:
        process.close()
    assert re.search(f"^Error: {complaint}", said, re.MULTILINE), said
    assert "give --store HOST:PORT" in said
    assert "Traceback" not in said


def test_on_a_loopback_it_advertises_the_loopback_that_it_listens_on() -> None:
    """The default would be an address of this host that nothing listens on."""
    with Manager(
        NOWHERE, "a", env={"LIGHTHOUSE_MANAGER_ADVERTISE": "", "LIGHTHOUSE_MANAGER_BIND": "localhost:0"}
    ) as manager:
        assert manager.address.startswith("localhost:")
        with ManagerClient(manager.address) as client:
            assert client.status().replica_id == "a"


def test_the_http_port_of_a_lighthouse_ends_it_at_once_with_the_remedy(lighthouse: Lighthouse) -> None:
    with Manager(lighthouse.http.removeprefix("http://"), "a") as manager:
        assert manager.wait() == 2
        (said,) = [line for line in manager.log().splitlines() if "cannot use the lighthouse" in line]
    assert "this is an HTTP port, not a gRPC port; the defaults of a lighthouse are 29510" in said
