"""`lighthouse-manager run --keep-every K` with real processes: all ranks of all groups are killed."""

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.ports import free_port
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from tests.daemons.supervisors import Supervisor
from tests.processes import MANAGER_CODE, ROOT, Lighthouse, eventually, run_cli

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SCRIPT = "benchmarks.support.kept_rank"
STEPS = 40
WITHIN_S = 240.0
SECRET = "known_to_both_groups_and_to_these_tests"


class Event(NamedTuple):
    at: float
    what: str
    step: int
    more: object


@pytest.fixture
def own_lighthouse() -> Iterator[Lighthouse]:
    """Both groups are in every quorum, so each step is a function of the one before."""
    with Lighthouse("--min-replicas", "2") as process:
        yield process


def group(
    address: str,
    folder: Path,
    name: str,
    *options: str,
    steps: int = STEPS,
    ranks: int = 1,
    script: Sequence[str] = (),
    prefix: Sequence[str] = (),
) -> Supervisor:
    folder.mkdir(exist_ok=True)
    port = free_port()
    chosen = ("--store", "auto", "--master-port", str(port), "--restart-delay", "50ms", "--max-restarts", "99")
    chosen += ("--max-startup-failures", "0", "--group-world-size", str(ranks), "--nproc-per-node", str(ranks))
    command = ["-m", SCRIPT, str(folder), "--steps", str(steps), "--hold", str(folder.parent / "hold"), *script]
    env = {"MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), MANAGER_SECRET_VARIABLE: SECRET}
    return Supervisor(address, *chosen, *options, command=command, replica_id=name, env=env, prefix=list(prefix))


def events(folder: Path, what: str = "commit") -> list[list[Event]]:
    """Of each rank."""
    found = [path.read_text().split("\n")[:-1] for path in sorted(folder.iterdir())]
    return [[event for event in map(Event._make, map(json.loads, lines)) if event.what == what] for lines in found]


def hold(tmp_path: Path, step: int) -> None:
    """Let no rank pass this step."""
    path = tmp_path / "hold"
    path.with_name("new").write_text(str(step))
    path.with_name("new").rename(path)


def reached(folder: Path, step: int, ranks: int) -> None:
    """Wait until each rank has committed this step."""

    def look() -> bool:
        found = events(folder) if folder.exists() else []
        return len(found) == ranks and all(any(event.step == step for event in commits) for commits in found)

    eventually(look, f"{ranks} ranks have committed step {step}", WITHIN_S)


def digests(folder: Path) -> dict[int, set[object]]:
    found: dict[int, set[object]] = {}
    for commits in events(folder):
        for event in commits:
            found.setdefault(event.step, set()).add(event.more)
    return found


def kill_all(*supervisors: Supervisor) -> None:
    ranks = [pid for supervisor in supervisors for pid in sorted({*supervisor.below} - {*supervisor.stores()})]
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def undisturbed(tmp_path: Path, ranks: int = 1) -> dict[int, set[object]]:
    folder = tmp_path / "undisturbed" / "events"
    folder.parent.mkdir()
    with Lighthouse("--min-replicas", "2") as lighthouse:
        address = lighthouse.address
        with group(address, folder, "a", ranks=ranks) as a, group(address, folder, "b", ranks=ranks) as b:
            assert (a.wait(WITHIN_S), b.wait(WITHIN_S)) == (0, 0)
    return digests(folder)


def repeated(folder: Path) -> list[list[int]]:
    """For each restart, how many of the steps that any rank had committed each rank has committed again."""
    commits, starts = events(folder), events(folder, "starts")
    found: list[list[int]] = []
    for number in range(1, len(starts[0])):
        at = min(every[number].at for every in starts)
        before = max(event.step for every in commits for event in every if event.at < at)
        found.append([before + 1 - next(event.step for event in every if event.at > at) for every in commits])
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_kill_of_all_ranks_one_step_is_lost_at_most_and_the_weights_are_those_of_an_undisturbed_run(
    own_lighthouse: Lighthouse, tmp_path: Path, ranks: int
) -> None:
    folder, keep, address = tmp_path / "killed", ("--keep-every", "1"), own_lighthouse.address
    hold(tmp_path, 10)
    with (
        group(address, folder, "a", *keep, ranks=ranks) as a,
        group(address, folder, "b", *keep, ranks=ranks) as b,
    ):
        for step in (10, 21, 32):
            reached(folder, step, 2 * ranks)
            kill_all(a, b)
            hold(tmp_path, step + 11)
        assert (a.wait(WITHIN_S), b.wait(WITHIN_S)) == (0, 0), a.log() + b.log()
        logs = a.log() + b.log()
    # The last output of a killed rank is shown again, without its prefix.
    assert len(re.findall(r"^\[[ab]/\d\] .*which this host has kept in memory", logs, re.MULTILINE)) == 3 * 2 * ranks
    assert [len(each) for each in events(folder, "starts")] == [4] * 2 * ranks
    assert all(0 <= steps <= 1 for each in repeated(folder) for steps in each), repeated(folder)
    assert digests(folder) == undisturbed(tmp_path, ranks)


def test_if_the_memory_of_a_host_is_lost_its_group_heals_from_one_that_has_kept_the_state(
    own_lighthouse: Lighthouse, tmp_path: Path
) -> None:
    folder, keep, address = tmp_path / "killed", ("--keep-every", "1"), own_lighthouse.address
    hold(tmp_path, 10)
    with group(address, folder, "a", *keep) as a:
        with group(address, folder, "b", *keep) as b:
            reached(folder, 10, 2)
            b.kill()
            kill_all(a)
            eventually(b.gone, "the host of b is lost")
        (tmp_path / "hold").unlink()
        with group(address, folder, "b", *keep) as b:
            assert (a.wait(WITHIN_S), b.wait(WITHIN_S)) == (0, 0), a.log() + b.log()
            assert "which this host has kept in memory" in a.log()
            assert "which this host has kept in memory" not in b.log()
    assert all(0 <= steps <= 1 for each in repeated(folder) for steps in each), repeated(folder)
    assert digests(folder) == undisturbed(tmp_path)


def test_without_memory_training_goes_on_and_the_status_says_why_nothing_is_kept(
    own_lighthouse: Lighthouse, tmp_path: Path
) -> None:
    """Under a limit of 1 MB for a file, the memory of 3 MB cannot be had."""
    folder, address, options = tmp_path / "short", own_lighthouse.address, ("--keep-every", "1")
    large, limit = ("--width", "512"), ("prlimit", "--fsize=1000000")
    hold(tmp_path, 8)
    with (
        group(address, folder, "a", *options, script=large, prefix=limit) as a,
        group(address, folder, "b", *options, script=large) as b,
    ):
        reached(folder, 8, 2)
        assert "File too large" in kept_row(a)
        assert re.fullmatch(r"step [78] in memory, up to 3\.\d MiB per rank", kept_row(b)), kept_row(b)
        assert a.log().count("is not kept in memory") == 1


def kept_row(supervisor: Supervisor) -> str:
    address = supervisor.wait_for_log(r"serves on (\S+);")[1]
    shown = run_cli(MANAGER_CODE, "status", "--manager", address, env={MANAGER_SECRET_VARIABLE: SECRET}).stdout
    return next(line.removeprefix("keeps").strip() for line in shown.splitlines() if line.startswith("keeps"))
