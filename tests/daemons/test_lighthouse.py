"""The lighthouse as a process: its services, its signals, its HTTP side, its options and what survives it."""

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lighthouse_protocol import VERSION
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, UnknownName, Unreachable
from lighthouse_runtime.client.clients import LighthouseClient, ManagerClient
from tests.daemons import document
from tests.daemons.wire import call, check_health_and_reflection, without_moments
from tests.processes import (
    LIGHTHOUSE_CODE,
    PATIENCE_S,
    TORCHFT_LIGHTHOUSE_CODE,
    Lighthouse,
    Manager,
    eventually,
    http_get,
    http_json,
    run_cli,
    together,
)

SERVICES = ("lighthouse.v1.LighthouseService", "LighthouseService", "torchft.LighthouseService")


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    """One for all tests that change nothing for the others; each uses a job of its own."""
    with Lighthouse("--heartbeat-timeout", "1h") as process:
        yield process


# -- services


@pytest.mark.parametrize("package", ["", "lighthouse.v1."])
def test_a_client_compiled_from_the_documents_text_is_served(lighthouse: Lighthouse, package: str) -> None:
    text = document.compile_text(document.LIGHTHOUSE)
    methods = {path.replace("/", "/" + package, 1): kinds for path, kinds in text.methods.items()}
    assert [path.rpartition("/")[2] for path in methods] == ["Quorum", "Heartbeat"]
    job = [("lighthouse-job", f"document{len(package)}")]
    said = {"replica_id": "a", "address": "10.0.0.1:1", "store_address": "10.0.0.1:2", "step": 7, "world_size": 3}
    answers = {}
    for path, (request, answer) in methods.items():
        fields = {"requester": said} if path.endswith("Quorum") else {"replica_id": "a"}
        answers[path.rpartition("/")[2]] = call(lighthouse.address, path, request(**fields), answer, metadata=job)
    quorum: Any = answers["Quorum"].quorum
    assert [{field.name: value for field, value in each.ListFields()} for each in quorum.participants] == [said]
    assert quorum.quorum_id > 0
    assert quorum.created.seconds > 1_700_000_000


def test_a_field_that_nobody_knows_is_relayed(lighthouse: Lighthouse) -> None:
    unknown = b"\xaa\x06\x05hello"  # field 101
    for service in SERVICES:
        inner = torchft_pb2.QuorumMember(replica_id="a", world_size=1).SerializeToString() + unknown
        job = [("lighthouse-job", "unknown" + service)]
        answer = call(lighthouse.address, f"/{service}/Quorum", b"\x0a" + bytes([len(inner)]) + inner, metadata=job)
        assert unknown in answer


def test_health_and_reflection(lighthouse: Lighthouse) -> None:
    native = lighthouse_pb2.DESCRIPTOR.services_by_name["LighthouseService"]
    check_health_and_reflection(lighthouse.address, native, "torchft.LighthouseService")


# -- the HTTP side


def test_liveness_and_readiness(lighthouse: Lighthouse) -> None:
    assert http_get(lighthouse.http + "/livez") == (200, "ok\n")
    assert http_get(lighthouse.http + "/readyz") == (200, "ok\n")
    assert http_get(lighthouse.http + "/nothing")[0] == 404


def test_status_and_metrics_show_the_same(lighthouse: Lighthouse) -> None:
    with LighthouseClient(lighthouse.address, job="shown") as client:
        quorum_id = client.quorum(Participant("a", step=3), timeout_s=30).quorum_id
        over_rpc = client.status("shown").jobs[0]
    shown = next(job for job in http_json(lighthouse.http + "/status")["jobs"] if job["job"] == "shown")
    assert (shown["quorum_id"], shown["verdict"]) == (over_rpc.quorum_id, over_rpc.verdict) == (quorum_id, "formed")
    assert [(m["replica_id"], m["state"], m["step"]) for m in shown["members"]] == [("a", "participant", 3)]
    metrics = http_get(lighthouse.http + "/metrics")[1]
    [value] = re.findall(r'^lighthouse_quorum_id\{job="shown"\} (\S+)$', metrics, re.MULTILINE)
    assert float(value) == quorum_id


def test_the_verb_s_json_is_that_of_slash_status_and_tells_the_time_and_the_store(tmp_path: Path) -> None:
    with Lighthouse("--journal", str(tmp_path / "j.sqlite")) as process, Manager(process.address):
        ended = run_cli(LIGHTHOUSE_CODE, "status", "--format", "json", "--lighthouse", process.address)
        told, shown = json.loads(ended.stdout), http_json(process.http + "/status")
    assert shown.pop("pace").keys() == {"default"}, "what the page draws, and it alone"
    assert process.address.endswith(f":{shown.pop('grpc_port')}")
    assert without_moments(told) == without_moments(shown)
    assert abs(told["now_unix_s"] - time.time()) < PATIENCE_S
    assert told["store"] == {"kind": "journal", "term": 1, "error": ""}
    assert [member["replica_id"] for job in told["jobs"] for member in job["members"]] == ["a"]
    assert told["jobs"][0]["timeline"] != []


# -- signals


def test_sigint_ends_it_with_status_0() -> None:
    with Lighthouse() as process:
        process.signal(signal.SIGINT)
        assert process.wait() == 0
        assert process.log().rstrip().endswith("lighthouse stopped")
        assert "Traceback" not in process.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_it_drains_it_is_alive_and_not_ready_and_a_second_signal_ends_it_at_once(number: int) -> None:
    """A stream keeps it from ending."""
    with Lighthouse("--shutdown-timeout", "10m") as process, grpc.insecure_channel(process.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(watch)
        process.signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert http_get(process.http + "/livez") == (200, "ok\n")
        assert http_get(process.http + "/readyz") == (503, "draining\n")
        process.signal(number)
        assert process.wait() == 128 + number


# -- jobs


def test_jobs_do_not_see_each_other(lighthouse: Lighthouse) -> None:
    """Callers that name none are in the default one."""
    quorum_ids = {}
    for step, job in enumerate(("one", "two", "default")):
        with LighthouseClient(lighthouse.address, job=job) as client:
            quorum = client.quorum(Participant("same", step=step), timeout_s=30)
        assert [p.step for p in quorum.participants] == [step]
        quorum_ids[job] = quorum.quorum_id
    with LighthouseClient(lighthouse.address) as client:
        for job, quorum_id in quorum_ids.items():
            (shown,) = client.status(job).jobs
            assert (shown.job, shown.quorum_id) == (job, quorum_id)
        assert set(quorum_ids) <= {job.job for job in client.status().jobs}
        with pytest.raises(UnknownName, match=r"a quorum of 'three'; known jobs: .*one, .*two"):
            client.status("three")


# -- options and environment


def test_our_environment_variables() -> None:
    env = {"LIGHTHOUSE_BIND": "127.0.0.1:0", "LIGHTHOUSE_MIN_REPLICAS": "2", "LIGHTHOUSE_LOG_FORMAT": "json"}
    with Lighthouse(env=env) as process, LighthouseClient(process.address) as client:
        with pytest.raises(DeadlinePassed, match="1 of at least 2 joined"):
            client.quorum(Participant("a"), timeout_s=1.0)
        process.stop()
        assert {json.loads(line)["level"] for line in process.log().splitlines()} == {"info"}


@pytest.mark.parametrize("code", [LIGHTHOUSE_CODE, TORCHFT_LIGHTHOUSE_CODE])
def test_torchfts_spellings(code: str) -> None:
    options = ["--min_replicas", "1", "--join_timeout_ms", "100", "--quorum_tick_ms", "100"]
    options += ["--heartbeat_timeout_ms", "600000"]
    with Lighthouse(*options, code=code) as process, LighthouseClient(process.address) as client:
        client.heartbeat("b")
        quorum = client.quorum(Participant("a"), timeout_s=60)  # join_timeout was 60 s by default
        assert [p.replica_id for p in quorum.participants] == ["a"]
        assert [m.state for m in client.status().jobs[0].members] == ["participant", "timed_out"]
        assert process.stop() == 0


def test_the_version_is_one_everywhere(lighthouse: Lighthouse) -> None:
    assert http_json(lighthouse.http + "/status")["version"] == VERSION
    assert run_cli(LIGHTHOUSE_CODE, "--version").stdout.strip().endswith(VERSION)


# -- kill


def test_kill_ends_a_group_through_its_manager(lighthouse: Lighthouse) -> None:
    with Manager(lighthouse.address, "a", "--job", "killed") as manager, ManagerClient(manager.address) as rank:
        rank.quorum(0, 0, timeout_s=30)
        at = ("--job", "killed", "--lighthouse", lighthouse.address)
        ended = run_cli(LIGHTHOUSE_CODE, "kill", "a", "--force", "--reason", "bad disk", *at)
        assert (ended.stdout, ended.stderr) == ("killed replica group a of job killed\n", "")
        assert manager.wait() == 1
        assert re.search(r"killed by .*: bad disk", manager.log())
        assert "bad disk" in lighthouse.log()


def test_the_kill_of_a_group_that_holds_no_session_is_an_incident(lighthouse: Lighthouse) -> None:
    """As torchft's: it joins by the unary call, is named name:uuid, and no quorum stands. Its manager is called."""
    torchfts, at = "t:5f0c1d1e-8a9b-4c3d-9e2f-001122334455", ("--lighthouse", lighthouse.address, "--job", "unary")
    with Manager(lighthouse.address, "t", "--job", "of_the_manager") as manager:
        with LighthouseClient(lighthouse.address, job="unary") as client:
            client.quorum(Participant("t", torchfts.partition(":")[2], torchfts, manager.address), timeout_s=30)
        assert run_cli(LIGHTHOUSE_CODE, "kill", torchfts, "--force", "--reason", "it hangs", *at).returncode == 0
        assert manager.wait() == 1
    [incident] = json.loads(run_cli(LIGHTHOUSE_CODE, "incidents", "--format", "json", *at).stdout)
    assert re.fullmatch(r"t: killed by 127\.0\.0\.1:\d+: it hangs", incident["text"])


def test_kill_of_a_group_that_shows_no_manager_says_so(lighthouse: Lighthouse) -> None:
    with LighthouseClient(lighthouse.address, job="hidden") as client:
        client.heartbeat("a")
        with pytest.raises(LighthouseError, match="a advertises no manager address, so it cannot be killed"):
            client.kill("a")
    with LighthouseClient(lighthouse.address, job="gone") as client:
        client.quorum(Participant("b", address="127.0.0.1:1"), timeout_s=30)
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 does not answer"):
            client.kill("b", timeout_s=10)


# -- restart


def test_managers_live_through_a_restart_of_the_lighthouse_and_ids_go_upwards() -> None:
    """Defect 4: quorum_id restarts at 1 with the lighthouse."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Lighthouse("--min-replicas", "2"))
        managers = [Manager(first.address, name) for name in ("a", "b")]
        stack.enter_context(together(*managers))
        ranks = [stack.enter_context(ManagerClient(manager.address)) for manager in managers]
        pool = stack.enter_context(ThreadPoolExecutor())

        def step(number: int) -> int:
            asked = [pool.submit(rank.quorum, 0, number, timeout_s=60) for rank in ranks]
            (quorum_id,) = {answer.result(60).quorum_id for answer in asked}
            return quorum_id

        ids = [step(0), step(1)]
        assert ids[0] == ids[1]
        for _ in range(2):
            first.kill()
            eventually(lambda: not any(rank.status().lighthouse_reachable for rank in ranks), "both have noticed")
            assert [http_get(manager.http + "/readyz")[0] for manager in managers] == [503, 503]
            asked = pool.submit(step, len(ids))
            first = stack.enter_context(Lighthouse("--min-replicas", "2", "--bind", first.address))
            ids.append(asked.result(90))
            eventually(lambda: all(rank.status().lighthouse_reachable for rank in ranks), "both are back")
            assert [http_get(manager.http + "/readyz")[0] for manager in managers] == [200, 200]
        assert ids[1] < ids[2] < ids[3]
        assert all(manager.is_alive for manager in managers)
