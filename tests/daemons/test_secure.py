"""A lighthouse that other hosts reach: who gets in, with what, and what each is told; seen from another host."""

import json
import os
import re
import socket
import stat
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from examples.ports import free_port
from lighthouse_protocol.coordinator import Coordinator, parse_coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import LIGHTHOUSE_PORT, MANAGER_SECRET_VARIABLE
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import NotPermitted, UnknownName, Unreachable
from lighthouse_protocol.rules.access import POLICY, Role
from lighthouse_runtime.client import connection
from lighthouse_runtime.client.clients import LighthouseClient, ManagerClient
from lighthouse_runtime.security.client_tls import fetch_tls
from lighthouse_runtime.security.credentials import ROLES, Tokens, load_or_make
from tests.daemons.elsewhere import Elsewhere
from tests.daemons.secured import EVERYWHERE, Secured
from tests.daemons.supervisors import Supervisor
from tests.processes import LIGHTHOUSE_CODE, LOCALHOST, PATIENCE_S, Lighthouse, Manager, Process, eventually, run_cli

SECRET = "known_to_the_group_and_to_this_test"
SERVICE = "/lighthouse.v1.LighthouseService/"
LOOPBACK_PEER = r"(127\.0\.0\.1|\[::1\]):\d+"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("state") / "credentials"
    options = ("--credentials", str(folder), "--torchft-listen", f"{LOCALHOST}:0", "--allow-chaos")
    with Lighthouse(*EVERYWHERE, *options) as lighthouse:
        yield Secured(lighthouse, folder)


def raw_status(coordinator: Coordinator, path: str) -> grpc.StatusCode:
    """How a call of that path with nothing in it ends. A stream is ended at once."""
    metadata = (("authorization", f"Bearer {coordinator.token}"),) if coordinator.token else ()
    with connection.open_channel(grpc, coordinator, fetch_tls(coordinator, 20)) as opened:
        try:
            if path.rpartition("/")[2] in ("Session", "Rank", "Supervise"):
                for _ in opened.stream_stream(path)(iter(()), metadata=metadata, timeout=20):
                    pass
            else:
                opened.unary_unary(path)(b"", metadata=metadata, timeout=20)
        except grpc.RpcError as e:
            return e.code()
    return grpc.StatusCode.OK


def rpcs() -> list[str]:
    return [path for path in POLICY if "LighthouseService/" in path]


# -- what is made


def test_what_is_made_is_for_its_user_alone_and_no_log_has_a_token(secured: Secured) -> None:
    assert stat.S_IMODE(secured.folder.stat().st_mode) == 0o700
    files = sorted(secured.folder.iterdir())
    assert [file.name for file in files] == ["ca.key", "ca.pem", "server.key", "server.pem", "tokens.json"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    tokens, log = Tokens.read(secured.folder), secured.lighthouse.log()
    assert [tokens.newest(role)[:4] for role in ROLES] == ["lhj_", "lho_", "lhv_", "lhc_"]
    assert re.search(r"`lighthouse token join --port \d+` prints the join string for other hosts", log)
    assert not [token for token in tokens.all() if token in log], "what collects standard error keeps it"
    with Lighthouse(*EVERYWHERE, "--credentials", str(secured.folder)) as second:
        assert not [token for token in tokens.all() if token in second.log()]


def test_the_command_prints_the_string_that_joins(secured: Secured) -> None:
    for role in ROLES:
        where = ("--credentials", str(secured.folder), "--port", str(secured.lighthouse.port), "--host", LOCALHOST)
        said = run_cli(LIGHTHOUSE_CODE, "token", role, *where)
        assert (said.returncode, parse_coordinator(said.stdout)) == (0, secured.coordinator(role))
    shared = ("--credentials", str(secured.folder), "--host", "coordinator-1,coordinator-2:29520")
    places = (Address("coordinator-1", LIGHTHOUSE_PORT), Address("coordinator-2", 29520))
    said = run_cli(LIGHTHOUSE_CODE, "token", *shared)
    assert parse_coordinator(said.stdout) == replace(secured.coordinator(Role.JOIN), addresses=places)
    said = run_cli(LIGHTHOUSE_CODE, "token", "--credentials", str(secured.folder / "none"))
    assert (said.returncode, "this user has not run a lighthouse for other hosts" in said.stderr) == (1, True)


# -- who may what


@pytest.mark.parametrize("role", [None, *ROLES])
def test_each_role_against_each_rpc(secured: Secured, role: Role | None) -> None:
    coordinator = secured.coordinator(role)
    with ThreadPoolExecutor(4) as pool:
        codes = dict(zip(rpcs(), pool.map(lambda path: raw_status(coordinator, path), rpcs()), strict=True))
    for path, code in codes.items():
        assert (code is not grpc.StatusCode.PERMISSION_DENIED) == _may_call(role, POLICY[path]), (path, code)


def _may_call(role: Role | None, needed: frozenset[Role]) -> bool:
    if role is Role.OPERATE:
        return needed != {Role.CHAOS}
    roles = {Role.CHAOS, Role.VIEW} if role is Role.CHAOS else {role}
    return Role.PROBE in needed or not roles.isdisjoint(needed)


@pytest.mark.parametrize("role", [None, *ROLES])
def test_each_role_against_each_route(secured: Secured, role: Role | None) -> None:
    token = secured.coordinator(role).token
    for route in (route for route in POLICY if route.startswith("GET ")):
        needed, path = POLICY[route], route.removeprefix("GET ").replace("{id}", "x")
        if path == "/events" and role in (Role.OPERATE, Role.VIEW, Role.CHAOS):
            continue  # it has no end
        code, body = secured.get(path, token)
        assert (code != 403) == _may_call(role, needed), (route, code, body)


def test_a_wrong_token_is_refused_in_one_line_and_noted(secured: Secured) -> None:
    wrong = Coordinator(secured.coordinator(None).addresses, secured.pin, "lho_" + "guess" * 6)

    def is_noted() -> bool:  # refusals are noted at a limited rate, and the tests before have caused many
        with LighthouseClient(wrong) as client, pytest.raises(NotPermitted, match="or was rotated away: run"):
            client.kill("a")
        return last()["role"] == "none"

    def last() -> dict[str, Any]:
        return [entry for entry in secured.audit if entry["what"] == "Kill"][-1]

    eventually(is_noted, "the refusal is noted")
    assert secured.get("/status", wrong.token)[0] == 403
    noted = last()
    assert re.fullmatch(LOOPBACK_PEER, noted["peer"])
    assert (noted["role"], noted["credential"], noted["result"][:8]) == ("none", "none", "refused:")
    assert stat.S_IMODE((secured.folder.parent / "audit.refused.jsonl").stat().st_mode) == 0o600
    assert wrong.token not in json.dumps(secured.audit) + secured.lighthouse.log()


@pytest.mark.parametrize("role", [Role.JOIN, Role.OPERATE])
def test_the_remedy_of_a_wrong_token_works_when_it_is_pasted(secured: Secured, role: Role) -> None:
    """It names the port of this lighthouse, and asks for what the caller has tried to be. Kill needs an operator."""
    wrong = replace(secured.coordinator(role), token=ROLES[role] + "guess" * 6).join_string()
    order = ("kill", "nobody", "--force", "--lighthouse")
    said = run_cli(LIGHTHOUSE_CODE, *order, wrong)
    assert said.returncode == 1
    answers = [run_cli(LIGHTHOUSE_CODE, *order, _pasted(said.stderr))]
    if role is Role.JOIN:
        assert "Kill needs a credential of role operate" in answers[0].stderr
        answers.append(run_cli(LIGHTHOUSE_CODE, *order, _pasted(answers[0].stderr)))
    assert "credential" not in answers[-1].stderr, "it may, and there is none of that name"
    assert "nobody" in answers[-1].stderr or "known jobs" in answers[-1].stderr


def _pasted(error: str) -> str:
    """What the command in `error` prints, at an address that this host resolves."""
    command = re.findall(r"`lighthouse ([a-z0-9 -]+)`", error)[-1]
    said = run_cli(LIGHTHOUSE_CODE, *command.split(), "--host", LOCALHOST)
    assert said.returncode == 0, said.stderr
    return said.stdout.strip()


def test_a_token_of_another_port_is_asked_for_with_the_right_one(secured: Secured) -> None:
    said = run_cli(LIGHTHOUSE_CODE, "token", "--port", str(free_port()))
    assert said.returncode == 1
    ports = re.search(r"there is one on ([\d, ]+): set --port", said.stderr)
    assert ports is not None, said.stderr
    assert str(secured.lighthouse.port) in ports[1].split(", ")


def test_an_operator_is_noted_by_name_with_what_and_how_it_ended(secured: Secured) -> None:
    with LighthouseClient(secured.coordinator(Role.OPERATE)) as client:
        with pytest.raises(UnknownName):
            client.drain("nobody", "maintenance")
    [*_, noted] = [entry for entry in secured.audit if entry["what"] == "Drain" and entry["role"] == "operate"]
    assert noted["credential"].startswith("operate-")
    assert noted["target"] == "replica_id=nobody, msg=maintenance"
    assert re.fullmatch(LOOPBACK_PEER, noted["peer"])
    assert noted["result"].startswith("refused: ")


def test_loopback_grants_nothing_and_the_users_own_files_do(secured: Secured) -> None:
    """H6: a forwarder on the lighthouse's host is local, too."""
    stranger = {"XDG_STATE_HOME": "/nonexistent"}
    where = ("--lighthouse", f"localhost:{secured.lighthouse.port}")
    said = run_cli(LIGHTHOUSE_CODE, "kill", "a", "--force", *where, env=stranger)
    assert said.returncode == 1
    command = f"`lighthouse token join --port {secured.lighthouse.port}`"
    assert f"pass its join string, which {command} prints" in said.stderr
    said = run_cli(LIGHTHOUSE_CODE, "kill", "a", "--force", *where)
    assert "credential" not in said.stderr, "it may, and there is none of that name"
    assert raw_status(secured.coordinator(None), SERVICE + "Kill") is grpc.StatusCode.PERMISSION_DENIED


# -- browsers


def test_a_browser_signs_in_and_its_cookie_is_good_for_what_its_token_is(secured: Secured) -> None:
    token, page = Tokens.read(secured.folder).newest(Role.VIEW), f"https://localhost:{secured.lighthouse.http_port}"
    assert json.loads(secured.get("/control")[1])["may_view"] is False
    assert secured.post("/login", {"token": "lhv_guess"}, Origin=page)[0] == 403
    assert secured.post("/login", {"token": token}, Origin="https://evil.example")[0] == 403
    assert secured.post("/login", {"token": secured.join_string(Role.VIEW)}, Origin=page)[0] == 200
    for part in ("HttpOnly", "Secure", "SameSite=Strict", "Path=/"):
        assert part in secured.cookie
    cookie = secured.cookie.partition(";")[0]
    assert token not in secured.cookie
    assert secured.get("/status", Cookie=cookie)[0] == 200
    assert secured.get("/status", Cookie=cookie, Host="evil.example")[0] == 403
    control = json.loads(secured.get("/control", Cookie=cookie)[1])
    assert (control["may_view"], control["may_act"]) == (True, False)
    order = {"job": "default", "replica_id": "a", "reason": ""}
    killed = secured.post("/kill", order, Origin=page, Cookie=cookie, **{"X-CSRF-Token": control["csrf"]})
    assert (killed[0], "needs a credential of role operate" in killed[1]) == (403, True)


# -- a second host


def test_a_second_host_joins_with_one_pasted_string(secured: Secured, elsewhere: Elsewhere) -> None:
    pasted = {"LIGHTHOUSE_ADDRESS": secured.join_string(Role.JOIN, elsewhere.here)}
    here = Manager(f"localhost:{secured.lighthouse.port}", "here", "--advertise", elsewhere.here)
    there = Manager(
        None,
        "there",
        "--advertise",
        elsewhere.there,
        "--bind",
        "[::]:0",
        env=pasted | {MANAGER_SECRET_VARIABLE: SECRET},
        prefix=elsewhere.command,
    )
    with here, there, ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(_quorum, here.address, ""), pool.submit(_quorum, there.address, SECRET)]
        assert {rank.result() for rank in ranks} == {("here", "there")}
        with Process(LIGHTHOUSE_CODE, ("kill", "there", "--force"), env=pasted, prefix=elsewhere.command) as kill:
            assert (kill.wait(), "needs a credential of role operate" in kill.log()) == (1, True)
        assert there.is_alive
        said = run_cli(LIGHTHOUSE_CODE, "kill", "there", "--lighthouse", f"localhost:{secured.lighthouse.port}")
        assert (said.returncode, there.wait()) == (0, 1)
        assert parse_coordinator(pasted["LIGHTHOUSE_ADDRESS"]).token not in there.log() + here.log()


def _quorum(manager: str, secret: str) -> tuple[str, ...]:
    with ManagerClient(manager, secret) as rank:
        return eventually(lambda: _two(rank.quorum(0, 0, timeout_s=60).replica_ids), "both are in")


def _two(ids: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(ids) if len(ids) == 2 else ()


# -- what changes while it runs


def test_tokens_and_certificates_change_under_calls_and_nothing_is_cut(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    with Lighthouse(*EVERYWHERE, "--credentials", str(folder)) as lighthouse:
        secured = Secured(lighthouse, folder)
        first = secured.coordinator(Role.JOIN)
        is_over, failed = threading.Event(), list[Exception]()

        def beat() -> None:
            with LighthouseClient(first) as client:
                while not is_over.is_set():
                    try:
                        client.heartbeat("a", timeout_s=30)
                    except Exception as e:  # noqa: BLE001  the test reads it
                        failed.append(e)
                    time.sleep(0.01)

        thread = threading.Thread(target=beat)
        thread.start()
        (folder / "server.pem").unlink()
        load_or_make(folder, ("localhost",))  # as the lighthouse does long before the end
        rotate = ("token", "rotate", "join", "--credentials", str(folder))
        assert run_cli(LIGHTHOUSE_CODE, *rotate).returncode == 0
        second = secured.coordinator(Role.JOIN)
        assert second.token != first.token
        for coordinator in (second, first):  # the newer one counts at once, the older one goes on
            _wait_until_known(coordinator)
        is_over.set()
        thread.join()
        assert failed == []
        assert run_cli(LIGHTHOUSE_CODE, *rotate).returncode == 0
        _wait_until_known(secured.coordinator(Role.JOIN))
        with LighthouseClient(first) as client, pytest.raises(NotPermitted, match="rotated away"):
            client.heartbeat("a")
        rotations = [entry for entry in secured.audit if entry["what"] == "rotate"]
        assert [entry["target"] for entry in rotations] == ["role=join"] * 2


def _wait_until_known(coordinator: Coordinator) -> None:
    def is_known() -> bool:
        try:
            with LighthouseClient(coordinator) as client:
                client.heartbeat("b", timeout_s=30)
        except NotPermitted:
            return False
        return True

    eventually(is_known, "the new token is read")


def test_strangers_that_fail_to_connect_write_nothing_into_the_log(tmp_path: Path) -> None:
    with Lighthouse(*EVERYWHERE, "--credentials", str(tmp_path / "credentials")) as lighthouse:
        before = lighthouse.log()
        for _ in range(3):
            with socket.create_connection((LOCALHOST, lighthouse.port), 60) as stranger:
                stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")  # what gRPC says without TLS
                while stranger.recv(1024):
                    pass
        assert lighthouse.log() == before


# -- without TLS


def test_insecure_says_so_and_lets_join_and_look_and_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    with Lighthouse(*EVERYWHERE, "--insecure", "--credentials", str(folder), env={"XDG_STATE_HOME": ""}) as lighthouse:
        plain = parse_coordinator(lighthouse.address)
        lighthouse.wait_for_log("INSECURE: other hosts reach this lighthouse without TLS")
        with LighthouseClient(Coordinator(plain.addresses, "", "")) as client:
            client.heartbeat("a")
            assert client.status().insecure
            with pytest.raises(NotPermitted, match="Kill needs a credential of role operate; anonymous has role"):
                client.kill("a")
        token = Tokens.read(folder).newest(Role.OPERATE)
        with LighthouseClient(Coordinator(plain.addresses, "", token)) as client, pytest.raises(UnknownName):
            client.kill("b")
        with urllib.request.urlopen(lighthouse.http + "/metrics", timeout=60) as answer:
            assert b"\nlighthouse_insecure 1.0\n" in answer.read()


def test_torchft_has_a_port_of_its_own_that_serves_nothing_else(secured: Secured) -> None:
    port = int(secured.lighthouse.wait_for_log(r"torchft clients are served without TLS on port (\d+)")[1])
    with grpc.insecure_channel(f"{LOCALHOST}:{port}") as opened:

        def call(path: str, request: bytes = b"") -> Any:
            return opened.unary_unary(path)(request, timeout=30)

        member = torchft_pb2.QuorumMember(replica_id="t", address="h:1", store_address="h:2", world_size=1)
        asked = torchft_pb2.LighthouseQuorumRequest(requester=member)
        call(
            "/torchft.LighthouseService/Heartbeat",
            torchft_pb2.LighthouseHeartbeatRequest(replica_id="t").SerializeToString(),
        )
        quorum = torchft_pb2.LighthouseQuorumResponse.FromString(
            opened.unary_unary("/torchft.LighthouseService/Quorum")(
                asked.SerializeToString(), timeout=60, metadata=(("lighthouse-job", "torchft"),)
            )
        )
        assert [each.replica_id for each in quorum.quorum.participants] == ["t"]
        for path in rpcs():
            if not path.startswith("/torchft."):
                with pytest.raises(grpc.RpcError) as e:
                    call(path)
                assert e.value.code() is grpc.StatusCode.UNIMPLEMENTED, path


def test_a_loopback_needs_nothing(tmp_path: Path) -> None:
    with Lighthouse(env={"XDG_STATE_HOME": str(tmp_path)}) as lighthouse:
        with LighthouseClient(lighthouse.address) as client:
            client.heartbeat("a")
            assert not client.status().insecure
            with pytest.raises(UnknownName):
                client.kill("b")
        assert list(tmp_path.rglob("credentials*")) == []


def test_an_agent_that_comes_before_the_first_start_finds_the_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for an address of its own host, when nothing tells yet that TLS will be spoken there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    port = free_port()
    late = Lighthouse("--bind", f"[::]:{port}", env={"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]})
    with LighthouseClient(f"localhost:{port}") as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.quorum, Participant("a", group_world_size=1), timeout_s=120)
        late.launch()
        try:
            assert [each.replica_id for each in waiting.result().participants] == ["a"]
        finally:
            late.close()
    with LighthouseClient(f"localhost:{port}") as client, pytest.raises(Unreachable):
        client.heartbeat("a")


# -- training


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_host_trains_by_one_pasted_string_is_killed_and_heals(
    secured: Secured, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    """README's commands on both hosts: this one finds its credentials, the other one has the string and no file."""
    pytest.importorskip("sklearn")
    events = {name: tmp_path / f"{name}.jsonl" for name in ("here", "there")}

    def group(name: str, lighthouse: str, address: str, **more: Any) -> Supervisor:
        options = ["--bind", "[::]:0", "--advertise", address, "--store", "auto", "--store-port", str(free_port())]
        script = [sys.executable, "examples/train_ddp.py", "--steps", "1000000", "--pace", "0.05"]
        return Supervisor(
            lighthouse,
            *options,
            replica_id=name,
            command=[*script, "--events", str(events[name])],
            **more,
        )

    def committed(name: str) -> list[dict[str, Any]]:
        text = events[name].read_text() if events[name].exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if "hash" in line]

    def at_work_together(after: int) -> int:
        """The newest step, once both have committed the same one after `after`, together and with the same weights."""

        def found() -> int:
            of_each = [{e["step"]: e for e in committed(name) if e["participants"] == 2} for name in events]
            shared = [step for step in of_each[0].keys() & of_each[1].keys() if step > after]
            assert all(of_each[0][step]["hash"] == of_each[1][step]["hash"] for step in shared)
            return max(shared, default=0)

        return eventually(found, "a step of both", 3 * PATIENCE_S)

    string = secured.join_string(Role.JOIN, elsewhere.here)
    far: dict[str, Any] = {"prefix": elsewhere.command, "env": {"XDG_STATE_HOME": str(tmp_path / "nothing")}}
    there = group("there", string, elsewhere.there, **far)
    with group("here", f"localhost:{secured.lighthouse.port}", elsewhere.here) as here, there:
        before = at_work_together(0)
        there.kill()
        eventually(there.gone, "nothing of the killed group is left")
        eventually(lambda: committed("here")[-1]["participants"] == 1, "the other one goes on")
        alone = committed("here")[-1]["step"]
        assert alone >= before
        with group("there", string, elsewhere.there, **far) as again:
            at_work_together(alone)
            again.wait_for_log(r"healed from \w+ at step \d+")
            assert again.stop() == here.stop() == 143
            assert parse_coordinator(string).token not in here.log() + there.log() + again.log()
