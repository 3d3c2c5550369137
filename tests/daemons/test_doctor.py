"""`lighthouse doctor` with real lighthouses and managers: each case ends by itself, with its remedy and exit status."""

import json
import socket
from pathlib import Path

import pytest

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client.clients import LighthouseClient
from tests.daemons.secured import EVERYWHERE, Secured
from tests.processes import LIGHTHOUSE_CODE, LOCALHOST, Lighthouse, Manager, run_cli


def examine(lighthouse: str, *options: str) -> tuple[int, list[tuple[str, str, str]]]:
    """The exit status, and check, level and text of each finding."""
    arguments = ("doctor", "--lighthouse", lighthouse, "--timeout", "30s", "--format", "json", *options)
    ended = run_cli(LIGHTHOUSE_CODE, *arguments)
    assert ended.stderr == ""
    shown = json.loads(ended.stdout)
    assert shown["is_healthy"] is (ended.returncode == 0)
    return ended.returncode, [(f["check"], f["level"], f["text"]) for f in shown["findings"]]


def not_good(findings: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [finding for finding in findings if finding[1] != "ok"]


def failure(lighthouse: str, *options: str) -> tuple[str, str]:
    """Check and text of the only finding that is not good."""
    status, findings = examine(lighthouse, *options)
    [(check, level, text)] = not_good(findings)
    assert (status, level) == (1, "fail")
    return check, text


def test_a_lighthouse_with_a_manager_is_healthy(tmp_path: Path) -> None:
    journal = ("--journal", str(tmp_path / "j.sqlite"))
    with Lighthouse(*journal) as lighthouse, Manager(lighthouse.address):
        status, findings = examine(lighthouse.address)
        text = run_cli(LIGHTHOUSE_CODE, "doctor", "--lighthouse", lighthouse.address)
    assert (status, not_good(findings)) == (0, [])
    assert {check for check, _, _ in findings} == {
        "address", "lighthouse", "tls", "token", "clock", "versions", "store", "sessions", "managers",
    }  # fmt: skip
    assert ("managers", "ok", "this host reaches 1 of 1 managers") in findings
    assert ("store", "ok", "the lighthouse writes to its journal, term 1") in findings
    assert text.returncode == 0
    assert [line.split()[:2] for line in text.stdout.splitlines()] == [["ok", check] for check, _, _ in findings]


def test_a_job_that_has_not_started_is_no_failure(tmp_path: Path) -> None:
    """Hosts are checked before the job starts. Managers of other jobs are not examined."""
    journal = ("--journal", str(tmp_path / "j.sqlite"))
    with Lighthouse(*journal) as lighthouse, Manager(lighthouse.address):
        status, findings = examine(lighthouse.address, "--job", "vision")
    assert (status, not_good(findings)) == (0, [])
    assert ("sessions", "ok", "no manager has connected to the lighthouse yet") in findings
    assert "managers" not in {check for check, _, _ in findings}


def test_a_dead_port_fails() -> None:
    with socket.socket() as taken:  # bound, and nothing listens
        taken.bind((LOCALHOST, 0))
        check, text = failure(f"{LOCALHOST}:{taken.getsockname()[1]}")
    assert check == "address"
    assert "connection refused; is it running at this address?" in text


def test_what_accepts_connections_and_says_nothing_fails_by_its_deadline() -> None:
    with socket.create_server((LOCALHOST, 0)) as mute:
        assert failure(f"{LOCALHOST}:{mute.getsockname()[1]}", "--timeout", "1s")[0] == "lighthouse"


def test_the_http_port_is_named_as_such(lighthouse: Lighthouse) -> None:
    check, text = failure(f"{LOCALHOST}:{lighthouse.http_port}")
    assert check == "lighthouse"
    assert "an HTTP port, not a gRPC port" in text


def test_the_port_of_a_manager_is_named_as_such(lighthouse: Lighthouse) -> None:
    with Manager(lighthouse.address) as manager:
        check, text = failure(manager.address)
    assert check == "lighthouse"
    assert "a manager's port instead of a lighthouse's" in text


def test_a_manager_that_is_not_reached_is_named() -> None:
    with Lighthouse("--heartbeat-timeout", "1h") as lighthouse, socket.socket() as taken:
        taken.bind((LOCALHOST, 0))
        address = f"{LOCALHOST}:{taken.getsockname()[1]}"
        with LighthouseClient(lighthouse.address) as client:
            client.quorum(Participant("ghost", address=address), timeout_s=60)
        status, findings = examine(lighthouse.address)
    [(check, _, text)] = [finding for finding in findings if finding[1] == "fail"]
    assert (status, check) == (1, "managers")
    assert text.startswith(f"ghost of job default: {address} is unreachable: connection refused")


def test_over_tls_it_tells_certificate_and_role_and_a_wrong_pin_with_its_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    with Lighthouse(*EVERYWHERE, "--credentials", str(folder)) as lighthouse:
        secured = Secured(lighthouse, folder)
        right = secured.join_string(Role.VIEW)
        status, findings = examine(right)
        wrong, no_token = (failure(right.replace(*to)) for to in ((secured.pin, "0" * 64), ("lhv_", "lhv_x")))
    assert status == 0
    assert ("tls", "ok", "the lighthouse's certificate is trusted by the pin of the join string") in findings
    assert any(check == "tls" and "valid for 90 more days" in text for check, _, text in findings)
    assert any(check == "token" and text.startswith("a token of role view is accepted") for check, _, text in findings)
    assert (wrong[0], "run `lighthouse token --port " in wrong[1]) == ("tls", True)
    assert (no_token[0], "run `lighthouse token view --port " in no_token[1]) == ("token", True)


@pytest.mark.parametrize("options", [("--help",), ("--format", "json", "--lighthouse", f"{LOCALHOST}:1")])
def test_torch_is_not_imported_to_tell_its_version(options: tuple[str, ...]) -> None:
    watched = (
        "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        + LIGHTHOUSE_CODE
    )
    assert run_cli(watched, "doctor", *options).stderr.splitlines()[-1] == "False"
