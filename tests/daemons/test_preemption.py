"""`lighthouse-manager run --preemption file=PATH` with real processes: a notice, its withdrawal, and the last group."""

import json
import re
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from examples.ports import free_port
from lighthouse_runtime.client.clients import LighthouseClient
from tests.daemons.supervisors import Supervisor
from tests.processes import LIGHTHOUSE_CODE, ROOT, Lighthouse, eventually, run_cli

pytest.importorskip("torch")

SCRIPT = str(ROOT / "tests/daemons/preempted_script.py")


@pytest.fixture
def own_lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse() as process:
        yield process


def group(address: str, folder: Path, name: str, *options: str) -> Supervisor:
    """A group with one rank, whose notice is the file NAME.notice. Its step waits while NAME.hold exists."""
    port = free_port()
    command = [SCRIPT, str(folder / name), str(folder / f"{name}.hold")]
    chosen = ("--store", "auto", "--master-port", str(port), "--preemption", f"file={folder / name}.notice", *options)
    return Supervisor(address, *chosen, command=command, replica_id=name, env={"MASTER_PORT": str(port)})


def last_commit(supervisor: Supervisor, groups: int) -> int:
    steps = re.findall(rf"commit (\d+) of {groups} ", supervisor.log())
    return int(steps[-1]) if steps else 0


def trains(supervisors: Sequence[Supervisor]) -> None:
    before = [last_commit(each, len(supervisors)) for each in supervisors]
    for each, step in zip(supervisors, before, strict=True):
        eventually(lambda each=each, step=step: last_commit(each, len(supervisors)) > step + 2, "all train")


def test_a_group_leaves_after_its_step_and_the_last_one_saves(own_lighthouse: Lighthouse, tmp_path: Path) -> None:
    address = own_lighthouse.address
    with group(address, tmp_path, "a") as a, group(address, tmp_path, "b") as b:
        trains((a, b))
        (tmp_path / "b.hold").touch()
        (tmp_path / "b.notice").write_text("90 the rack is repaired")
        b.wait_for_log("the group leaves after its step: 1 other group stays")
        shown = run_cli(LIGHTHOUSE_CODE, "status", "--lighthouse", address).stdout
        assert re.search(r"b ends in [789]\d s: the rack is repaired \(file\)", shown), shown
        shown = run_cli(LIGHTHOUSE_CODE, "members", "--lighthouse", address).stdout
        assert "ENDS IN" in shown
        (tmp_path / "b.hold").unlink()
        assert b.wait() == 143
        assert "notice file" in b.log()
        trains((a,))
        assert "discard" not in a.log() + b.log()
        assert not [*(tmp_path / "b").glob("step-*")], "another group stayed"

        (tmp_path / "a.notice").write_text("60")
        assert a.wait() == 143
        [saved] = (tmp_path / "a").glob("step-*")
        assert int(saved.name.split("-")[1]) == last_commit(a, 1)
        (tmp_path / "a.notice").unlink()
    with group(address, tmp_path, "a") as a:
        a.wait_for_log(f"starts at {int(saved.name.split('-')[1])}")


def test_a_withdrawn_notice_costs_nothing(own_lighthouse: Lighthouse, tmp_path: Path) -> None:
    address = own_lighthouse.address
    with group(address, tmp_path, "a") as a, group(address, tmp_path, "b") as b:
        trains((a, b))
        (tmp_path / "b.hold").touch()
        (tmp_path / "b.notice").touch()
        b.wait_for_log("the group leaves after its step")
        (tmp_path / "b.notice").unlink()
        b.wait_for_log("the group stays")
        (tmp_path / "b.hold").unlink()
        trains((a, b))
        assert "discard" not in a.log() + b.log()
        with LighthouseClient(address) as client:
            assert [member.preemption for member in client.status().jobs[0].members] == [None, None]


def post(port: int, body: object) -> object:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/preemption", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def test_the_http_hook_takes_and_withdraws_a_notice(own_lighthouse: Lighthouse, tmp_path: Path) -> None:
    with group(own_lighthouse.address, tmp_path, "a", "--http", "127.0.0.1:0") as a:
        port = int(a.wait_for_log(r"serves HTTP on port (\d+)")[1])
        trains((a,))
        (tmp_path / "a.hold").touch()
        assert post(port, {"seconds": 300, "reason": "maintenance"}) == {"preempted": True}
        a.wait_for_log("no other group stays, so its ranks save a checkpoint within 29[78] s")
        assert post(port, {"withdrawn": True}) == {"preempted": False}
        a.wait_for_log("the group stays")
        (tmp_path / "a.hold").unlink()
        trains((a,))
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(port, {"minutes": 3})


def test_sigterm_in_a_pod_is_a_notice_and_the_last_group_saves(own_lighthouse: Lighthouse, tmp_path: Path) -> None:
    options = ("--preemption", "kubernetes", "--preemption-grace", "60s")
    with group(own_lighthouse.address, tmp_path, "a", *options) as a:
        trains((a,))
        assert a.stop() == 143
        [saved] = (tmp_path / "a").glob("step-*")
        assert int(saved.name.split("-")[1]) == last_commit(a, 1)
