"""A group returns with a model or a script that is not its peers': real supervisors, a real lighthouse, real training.

Each time its rank ends at once with the cause, and each of the others loses at most the step in flight.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from examples.ports import free_port
from tests.daemons.supervisors import Supervisor
from tests.processes import LIGHTHOUSE_CODE, Lighthouse, eventually, run_cli, together

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).with_name("misfit_script.py"))
PRELOADED = "torch,torch._dynamo,agent_client.agent.agent"
NAMES = "abc"
ENDS_WITHIN_S = 5.0
OPTIONS = ("--max-restarts", "3", "--max-startup-failures", "0", "--restart-delay", "1s", "--max-restart-delay", "1s")
SOME_STEPS = 5
MORE_STEPS = 50

# Of other differences: agent_client/test_misfit.py and test_mismatch.py.
MISFITS: list[tuple[dict[str, Any], str]] = [
    (
        {"width": 24},
        r"ModelMismatch: the state received does not fit the local one: state\['model'\]\['generator.0.weight'\]: "
        r"shape \(24, 8\) here, \(16, 8\) received",
    ),
    (
        {"turn": 1},
        r"ScriptMismatch: step \d+: this group \(c\) reduces 1860 bytes of float32 \(\w+, bucket 0\) "
        "as collective 1 where a and b reduce",
    ),
]


class Groups:
    """Three replica groups of one rank each, each under a supervisor of its own."""

    def __init__(self, lighthouse: Lighthouse, folder: Path, job: str) -> None:
        self.lighthouse, self.job, self._folder = lighthouse, job, folder
        for name in NAMES:
            self.write_shape(name)
        self.supervisors = {name: self._supervisor(name) for name in NAMES}

    def _supervisor(self, name: str) -> Supervisor:
        ports = ("--master-port", str(free_port()), "--store", "auto", "--store-port", str(free_port()))
        named = ("--job", self.job, "--run-id", self.job, "--preload", PRELOADED)
        paths = [str(self._folder / file) for file in (f"{name}.shape", f"{name}.events", "stop")]
        return Supervisor(
            self.lighthouse.address,
            *(*named, *ports, *OPTIONS),
            command=[sys.executable, SCRIPT, *paths],
            replica_id=name,
            env={"OMP_NUM_THREADS": "1"},
        )

    def write_shape(self, name: str, **differs: Any) -> None:
        """What the next start of this group's rank builds; without `differs` what all build."""
        self._write(f"{name}.shape", json.dumps(differs))

    def events(self, name: str, what: str = "", since: float = 0.0) -> list[dict[str, Any]]:
        path = self._folder / f"{name}.events"
        whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
        told = [json.loads(line) for line in whole.splitlines()]
        return [event for event in told if what in ("", event["what"]) and event["at"] >= since]

    def pids(self, name: str) -> set[int]:
        return {event["pid"] for event in self.events(name)}

    def kill_rank(self, name: str) -> float:
        """SIGKILL; when."""
        now = time.monotonic()
        os.kill(self.events(name)[-1]["pid"], signal.SIGKILL)
        return now

    def wait_trained(self, names: str, since: float) -> None:
        """Some steps are committed by just these."""

        def have_trained() -> bool:
            committed = {name: self.events(name, "commits", since) for name in names}
            together = [[step for step in steps if step["participants"] == [*names]] for steps in committed.values()]
            return all(len(steps) >= SOME_STEPS for steps in together)

        eventually(have_trained, f"{names} train")

    def check_lost(self, since: float, at_most: int) -> None:
        lost = {name: len(self.events(name, "discards", since)) for name in "ab"}
        assert max(lost.values()) <= at_most, lost

    def check_incident(self, cause: str) -> None:
        """In the lighthouse's log, and in the list."""
        words = ("incidents", "--kind", "loss", "--job", self.job, "--format", "json")
        told = run_cli(LIGHTHOUSE_CODE, *words, "--lighthouse", self.lighthouse.address)
        newest, *_ = json.loads(told.stdout)
        assert newest["suspects"] == ["c"]
        assert re.match(f"c: rank 0 has failed: {cause}", newest["text"])
        line = rf"\[{self.job}\] incident {newest['id']}: loss: c: rank 0 has failed: {cause}"
        assert re.search(line, self.lighthouse.log())

    def end(self, names: str) -> None:
        """All of them with the same state, in the same step, and a and b in the processes that began."""
        last = max(self.events(name, "commits")[-1]["step"] for name in names)
        self._write("stop", str(last + MORE_STEPS))
        statuses = [self.supervisors[name].wait() for name in names]
        assert statuses == [0] * len(names), [self.supervisors[name].log() for name in names]
        ends = [self.events(name, "ends")[-1] for name in names]
        assert len({(event["step"], event["digest"]) for event in ends}) == 1, ends
        assert [len(self.pids(name)) for name in "ab"] == [1, 1]

    def _write(self, name: str, text: str) -> None:
        new = self._folder / "new"
        new.write_text(text)
        new.rename(self._folder / name)


@contextlib.contextmanager
def three_groups(lighthouse: Lighthouse, folder: Path, job: str) -> Generator[Groups]:
    groups = Groups(lighthouse, folder, job)
    with together(*groups.supervisors.values()):
        groups.wait_trained("abc", 0.0)
        yield groups


@pytest.mark.parametrize(("differs", "cause"), MISFITS, ids=["model", "script"])
def test_one_that_returns_again_and_again_ends_and_the_others_lose_a_step_each_time(
    lighthouse: Lighthouse, tmp_path: Path, differs: dict[str, Any], cause: str
) -> None:
    """Its first loss is the kill: it counts, too."""
    why = "the budget of 3 restarts within 3600 s is exhausted, 3 of them because this group does not fit its peers"
    [job] = differs
    with three_groups(lighthouse, tmp_path, job) as groups:
        groups.write_shape("c", **differs)
        killed_at = groups.kill_rank("c")
        supervisor = groups.supervisors["c"]
        assert supervisor.wait() == 1
        ended_at = time.monotonic()
        assert re.search(rf"ends with 1: {why}; rank 0 has ended by exit code 1: {cause}", supervisor.log())
        starts = groups.events("c", "asks", killed_at)
        fails = groups.events("c", "fails", killed_at)
        assert [cause.startswith(failed["error"]) for failed in fails] == [True] * 3
        assert all(failed["at"] - asked["at"] < ENDS_WITHIN_S for asked, failed in zip(starts, fails, strict=True))
        groups.check_incident(cause)
        groups.wait_trained("ab", ended_at)
        groups.check_lost(killed_at, at_most=4)
        groups.end("ab")
