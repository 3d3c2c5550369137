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
STEPS = 120
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
    command = ["-m", SCRIPT, str(folder), "--steps", str(steps), "--pace", "0.03", *script]
    env = {"MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), MANAGER_SECRET_VARIABLE: SECRET}
    return Supervisor(address, *chosen, *options, command=command, replica_id=name, env=env, prefix=list(prefix))


def events(folder: Path, what: str = "commit") -> list[list[Event]]:
    """Of each rank."""
    found = [path.read_text().split("\n")[:-1] for path in sorted(folder.iterdir())]
    return [[event for event in map(Event._make, map(json.loads, lines)) if event.what == what] for lines in found]


def since_start(folder: Path) -> list[int]:
    """Number of steps that each rank has committed since it was started last."""
    starts = [every[-1].at for every in events(folder, "starts")]
    return [sum(event.at > at for event in commits) for commits, at in zip(events(folder), starts, strict=True)]


def trains(folder: Path, ranks: int, steps: int = 10) -> None:
    def look() -> bool:
        found = since_start(folder) if folder.exists() else []
        return len(found) == ranks and min(found) >= steps

    eventually(look, f"{ranks} ranks have committed {steps} steps")


def digests(folder: Path) -> dict[int, set[object]]:
    found: dict[int, set[object]] = {}
    for commits in events(folder):
        for event in commits:
            found.setdefault(event.step, set()).add(event.more)
    return found


def kill_all(*supervisors: Supervisor) -> None:
    for pid in [pid for supervisor in supervisors for pid in supervisor.below if pid not in supervisor.stores()]:
        os.kill(pid, signal.SIGKILL)


def undisturbed(tmp_path: Path, ranks: int = 1) -> dict[int, set[object]]:
    folder = tmp_path / "undisturbed"
    with Lighthouse("--min-replicas", "2") as lighthouse:
        address = lighthouse.address
        with group(address, folder, "a", ranks=ranks) as a, group(address, folder, "b", ranks=ranks) as b:
            assert (a.wait(), b.wait()) == (0, 0)
    return digests(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_kill_of_all_ranks_one_step_is_lost_at_most_and_the_weights_are_those_of_an_undisturbed_run(
    own_lighthouse: Lighthouse, tmp_path: Path, ranks: int
) -> None:
    folder, keep = tmp_path / "killed", ("--keep-every", "1")
    address = own_lighthouse.address
    with (
        group(address, folder, "a", *keep, ranks=ranks) as a,
        group(address, folder, "b", *keep, ranks=ranks) as b,
    ):
        for _ in range(3):
            trains(folder, 2 * ranks)
            kill_all(a, b)
            eventually(lambda: not any(since_start(folder)), "all ranks have started again")
        assert (a.wait(), b.wait()) == (0, 0), a.log() + b.log()
        logs = a.log() + b.log()
    assert logs.count("which this host has kept in memory") == 3 * 2 * ranks
    for commits in events(folder):
        assert [event.step for event in commits][-1] == STEPS
    reached = events(folder)
    for attempt in (1, 2, 3):
        for commits, starts in zip(reached, events(folder, "starts"), strict=True):
            at = next(start.at for start in starts if start.more == attempt)
            before = max(event.step for every in reached for event in every if event.at < at)
            after = next(event.step for event in commits if event.at > at)
            assert before - 1 <= after - 1 <= before, "at most one step is repeated, and none is left out"
    found = digests(folder)
    assert found.keys() == set(range(1, STEPS + 1))
    assert found == undisturbed(tmp_path, ranks)


def test_if_the_memory_of_a_host_is_lost_its_group_heals_from_one_that_has_kept_the_state(
    own_lighthouse: Lighthouse, tmp_path: Path
) -> None:
    folder, address, keep = tmp_path / "killed", own_lighthouse.address, ("--keep-every", "1")
    with group(address, folder, "a", *keep) as a:
        with group(address, folder, "b", *keep) as b:
            trains(folder, 2)
            b.kill()
            kill_all(a)
            eventually(b.gone, "the host of b is lost")
        reached = max(event.step for commits in events(folder) for event in commits)
        with group(address, folder, "b", *keep) as b:
            assert (a.wait(), b.wait()) == (0, 0), a.log() + b.log()
            assert "which this host has kept in memory" in a.log()
            assert "which this host has kept in memory" not in b.log()
    after = [event.step for event in events(folder)[1] if event.at > events(folder, "starts")[1][-1].at]
    assert reached <= after[0] <= reached + 1, "b goes on where a does, one step is repeated at most"
    found = digests(folder)
    assert found.keys() == set(range(1, STEPS + 1))
    assert found == undisturbed(tmp_path)


def test_without_memory_training_goes_on_and_the_status_says_why_nothing_is_kept(
    own_lighthouse: Lighthouse, tmp_path: Path
) -> None:
    """Under a limit of 1 MB for a file, the memory of 3 MB cannot be had."""
    folder, address, options = tmp_path / "short", own_lighthouse.address, ("--keep-every", "1")
    large, limit = ("--width", "512"), ("prlimit", "--fsize=1000000")
    with (
        group(
            own_lighthouse.address,
            folder,
            "a",
            *options,
            steps=10**6,
            script=large,
            prefix=limit,
        ) as a,
        group(address, folder, "b", *options, steps=10**6, script=large) as b,
    ):
        trains(folder, 2)
        assert "File too large" in kept_row(a)
        assert re.fullmatch(r"step \d+ in memory, 3 MiB of each rank", kept_row(b)), kept_row(b)
        assert a.log().count("is not kept in memory") == 1


def kept_row(supervisor: Supervisor) -> str:
    address = supervisor.wait_for_log(r"serves on (\S+);")[1]
    shown = run_cli(MANAGER_CODE, "status", "--manager", address, env={MANAGER_SECRET_VARIABLE: SECRET}).stdout
    return next(line.removeprefix("keeps").strip() for line in shown.splitlines() if line.startswith("keeps"))
