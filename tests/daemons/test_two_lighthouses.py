"""Two lighthouses on one etcd, as processes: what a follower says, who is sent where, and what a failover leaves."""

import contextlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.ports import free_port
from lighthouse_protocol.limits import LEADER_METADATA_KEY, REFUSAL_METADATA_KEY
from lighthouse_protocol.messages.run import GenerationFormed, KeyKind, RankHello, RankId, RankWelcome, RunTerms
from lighthouse_protocol.pb.documented import lighthouse_pb2, lighthouse_pb2_grpc
from lighthouse_protocol.refusals import NotLeader
from lighthouse_runtime.client.clients import LighthouseClient
from tests.daemons.supervisors import SLEEP, Supervisor, runs
from tests.etcd_cluster import EtcdCluster, etcd_cluster, needs_etcd
from tests.processes import (
    LIGHTHOUSE_CODE,
    LOCALHOST,
    PATIENCE_S,
    ROOT,
    Lighthouse,
    clean_environment,
    eventually,
    http_get,
    http_json,
    run_cli,
    together,
)

pytestmark = needs_etcd

SECRET = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(etcd: EtcdCluster) -> Iterator[tuple[Lighthouse, Lighthouse]]:
    """The leader, and a follower that knows it."""
    leader, follower = (Lighthouse("--store", etcd.store("pair")) for _ in range(2))
    with leader:
        leader.wait_for_log("this lighthouse leads, in term 1")
        with follower:
            follower.wait_for_log("follows .*, which leads in term 1")
            yield leader, follower


def first_to_lead(*lighthouses: Lighthouse) -> Lighthouse:
    def found() -> list[Lighthouse]:
        return [lighthouse for lighthouse in lighthouses if "this lighthouse leads" in lighthouse.log()]

    return eventually(found, "one of them leads")[0]


def test_a_follower_refuses_each_call_and_names_the_leader(pair: tuple[Lighthouse, Lighthouse]) -> None:
    leader, follower = pair
    with grpc.insecure_channel(follower.address) as channel:
        stub = lighthouse_pb2_grpc.LighthouseServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Status(lighthouse_pb2.LighthouseStatusRequest(), timeout=10)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == f"this lighthouse is a follower; the leader is {leader.address}"
    told = dict(caught.value.trailing_metadata() or ())
    assert (told[REFUSAL_METADATA_KEY], told[LEADER_METADATA_KEY]) == ("NotLeader", leader.address)


def test_it_lives_and_is_not_ready_and_its_page_is_the_leaders(pair: tuple[Lighthouse, Lighthouse]) -> None:
    leader, follower = pair
    assert http_get(f"{follower.http}/livez")[0] == 200
    status, why = http_get(f"{follower.http}/readyz")
    assert (status, why) == (503, f"this lighthouse is a follower; the leader is {leader.address}\n")
    assert http_get(f"{leader.http}/readyz")[0] == 200
    with urllib.request.urlopen(f"{follower.http}/status?x=1") as answer:
        assert answer.url == f"{leader.http}/status?x=1"
    metrics = [http_get(f"{lighthouse.http}/metrics")[1] for lighthouse in pair]
    assert ["lighthouse_leader 1.0" in text for text in metrics] == [True, False]
    assert all("lighthouse_store_available 1.0" in text for text in metrics)


def test_a_client_of_the_follower_is_answered_by_the_leader(pair: tuple[Lighthouse, Lighthouse]) -> None:
    leader, follower = pair
    with LighthouseClient(follower.address) as client:
        assert client.status(timeout_s=10).jobs == ()
        assert client.address == leader.address
    for given in (follower.address, f"{follower.address},{leader.address}"):
        said = run_cli(LIGHTHOUSE_CODE, "status", "--lighthouse", given, "--format", "json")
        assert (said.returncode, json.loads(said.stdout)["jobs"]) == (0, []), said.stderr


def test_the_doctor_asks_the_leader_which_tells_its_term(pair: tuple[Lighthouse, Lighthouse]) -> None:
    leader, follower = pair
    both = f"{follower.address},{leader.address}"
    ended = run_cli(LIGHTHOUSE_CODE, "doctor", "--lighthouse", both, "--timeout", "30s", "--format", "json")
    findings = {finding["check"]: finding for finding in json.loads(ended.stdout)["findings"]}
    assert ended.returncode == 0
    assert findings["store"] == {"check": "store", "level": "ok", "text": "the lighthouse writes to its etcd, term 1"}


def test_the_port_of_torchft_clients_serves_while_it_leads(etcd: EtcdCluster) -> None:
    def health() -> object:
        with grpc.insecure_channel(f"{LOCALHOST}:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(service="torchft.LighthouseService"), timeout=10).status

    with Lighthouse("--store", etcd.store("torchft"), "--torchft-listen", f"{LOCALHOST}:0") as lighthouse:
        port = lighthouse.wait_for_log(r"torchft clients are served without TLS on port (\d+)")[1]
        lighthouse.wait_for_log("this lighthouse leads, in term 1")
        eventually(lambda: health() == health_pb2.HealthCheckResponse.SERVING, "its torchft port serves")


def test_two_with_their_own_credentials_say_so_and_pages_are_https(etcd: EtcdCluster, tmp_path: Path) -> None:
    everywhere = ("--store", etcd.store("differ"), "--bind", "[::]:0", "--http", "[::]:0", "--advertise", "localhost")
    leader, other, same = (
        Lighthouse(*everywhere, "--credentials", str(tmp_path / folder)) for folder in ("one", "two", "one")
    )
    with leader:
        leader.wait_for_log("this lighthouse leads")
        with other, same:
            other.wait_for_log(r"the leader localhost:\d+ has another CA \(pin [0-9a-f]{12}\)")
            same.wait_for_log("follows .*, which leads in term 1")
            assert "has another CA" not in same.log()
            moved = http.client.HTTPSConnection(
                "localhost", same.http_port, context=ssl.create_default_context(cafile=tmp_path / "one" / "ca.pem")
            )
            with contextlib.closing(moved):
                moved.request("GET", "/?x=1")
                answer = moved.getresponse()
                assert (answer.status, answer.headers["Location"]) == (
                    307,
                    f"https://localhost:{leader.http_port}/?x=1",
                )


def test_what_the_old_leader_has_written_down_the_new_one_has(etcd: EtcdCluster) -> None:
    """Keys of a run, which are durable when the call returns."""
    first, second = (Lighthouse("--store", etcd.store("records")) for _ in range(2))
    with together(first, second):
        leader = first_to_lead(first, second)
        with LighthouseClient(f"{first.address},{second.address}", run="r") as client:
            client.runs(timeout_s=20)  # finds the leader
            with client.rank() as stream:
                stream.send(RankHello(RankId(0, "i"), RunTerms(1), is_ready=True, secret=SECRET))
                told = [next(stream), next(stream)]
                assert RankWelcome(1) in told
                assert any(isinstance(message, GenerationFormed) for message in told)
                client.put_key(0, KeyKind.ITERATION, "k", b"v", slot=0, secret=SECRET, timeout_s=20)
            leader.kill()
            generation, keys = client.get_keys(timeout_s=20)
            assert (generation, keys[KeyKind.ITERATION, "k"]) == (0, b"v")
            assert client.address == (second if leader is first else first).address


def test_a_supervisor_goes_on_under_the_next_leader_and_hears_the_stop_from_it(etcd: EtcdCluster) -> None:
    first, second = (Lighthouse("--store", etcd.store("supervisor")) for _ in range(2))
    with together(first, second):
        leader = first_to_lead(first, second)
        addresses = f"{first.address},{second.address}"
        with Supervisor(addresses, "--run-id", "r", command=SLEEP) as supervisor:
            runs(supervisor, 1)
            leader.kill()
            supervisor.wait_for_log("lighthouse reachable again")
            assert len(supervisor.below) == 1
            stopped = run_cli(LIGHTHOUSE_CODE, "stop", "--lighthouse", addresses, "--run", "r", "--reason", "enough")
            assert stopped.returncode == 0, stopped.stderr
            supervisor.wait_for_log("enough")
            assert supervisor.wait() != 0
            eventually(supervisor.gone, "its ranks are gone")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root may give a host two addresses")
def test_one_name_with_two_addresses(etcd: EtcdCluster, tmp_path: Path) -> None:
    """As a DNS name has them: the one that answers names the leader."""
    port, hosts = free_port(), tmp_path / "hosts"
    hosts.write_text("127.0.0.2 pair\n127.0.0.3 pair\n127.0.0.1 localhost\n")
    as_pair = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts))

    def ask(name: str) -> int:
        code = LIGHTHOUSE_CODE.replace("\n", ";")
        words = [*as_pair, sys.executable, "-c", code, "status", "--lighthouse", f"{name}:{port}", "--timeout", "20s"]
        return subprocess.run(words, cwd=ROOT, env=clean_environment(), timeout=PATIENCE_S).returncode

    places = [("--bind", f"127.0.0.{i}:{port}", "--http", f"127.0.0.{i}:0") for i in (2, 3)]
    first, second = (Lighthouse("--store", etcd.store("name"), *place) for place in places)
    with together(first, second):
        leader = first_to_lead(first, second)
        assert ask("pair") == 0
        leader.kill()
        assert ask("pair") == 0
        assert ask("localhost") == 1


def test_the_name_that_a_lighthouse_advertises_is_its_own() -> None:
    """A follower sends browsers to it."""
    store = f"etcd://{LOCALHOST}:{free_port()}"
    with Lighthouse("--store", store, "--advertise", "lighthouse.example.com") as lighthouse:
        place = lighthouse.http.removeprefix("http://")
        for name, status in (("Lighthouse.example.com", 200), ("other.example.com", 403)):
            with contextlib.closing(http.client.HTTPConnection(place, timeout=PATIENCE_S)) as connection:
                connection.request("GET", "/metrics", headers={"Host": f"{name}:29511"})
                assert connection.getresponse().status == status


def test_without_the_store_no_lighthouse_leads_and_each_says_why() -> None:
    with etcd_cluster() as own, Lighthouse("--store", own.store()) as lighthouse:
        lighthouse.wait_for_log("this lighthouse leads")
        own.nodes[0].kill()
        own.nodes[1].kill()
        lighthouse.wait_for_log("this lighthouse no longer leads: its lease was not renewed")
        eventually(lambda: "store_unavailable" in http_get(f"{lighthouse.http}/readyz")[1])
        assert http_json(f"{lighthouse.http}/status")["error"].startswith("store_unavailable: etcd at ")
        assert "lighthouse_store_available 0.0" in http_get(f"{lighthouse.http}/metrics")[1]
        with LighthouseClient(lighthouse.address) as client:
            with pytest.raises(NotLeader, match="store_unavailable: etcd at .*; no lighthouse can lead"):
                client.status(timeout_s=1)
        own.start()
        lighthouse.wait_for_log("this lighthouse leads, in term 2")
        assert http_get(f"{lighthouse.http}/readyz")[0] == 200
        assert lighthouse.stop() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--store", "x:1"), "--store: 'x:1' is not a store; write etcd://HOST:2379,HOST:2379"),
        (("--store", "etcd://a", "--journal", "/tmp/x"), "--journal and --store are two places for the same records"),
        (("--store", "etcd://a", "--store-ttl", "1s"), "--store-ttl 1s: give whole seconds, at least 2"),
        (("--store-ca", "/dev/null"), "--store-ca is for --store, which is not given"),
    ],
)
def test_settings_that_contradict_each_other(options: tuple[str, ...], said: str) -> None:
    ended = run_cli(LIGHTHOUSE_CODE, "serve", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0", *options)
    assert ended.returncode == 2
    assert said in " ".join(ended.stderr.split())
