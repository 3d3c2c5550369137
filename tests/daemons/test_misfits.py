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
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.ports import free_port
from tests.daemons.supervisors import Supervisor
from tests.processes import LIGHTHOUSE_CODE, Lighthouse, eventually, run_cli, together

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).with_name("misfit_script.py"))
NAMES = "abc"
ENDS_WITHIN_S = 5.0
# At least half of it lies between two starts: time to write the shape of the next one.
DELAYS = ("--restart-delay", "2s", "--max-restart-delay", "2s")
SOME_STEPS = 5
MORE_STEPS = 50

OTHER_STATE = r"ModelMismatch: the received state does not match the local one: state\['model'\]"
OTHER_SCRIPT = r"ScriptMismatch: step \d+: this group \(c\) reduces"
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": 24}, OTHER_STATE + r"\['generator.0.weight'\]: shape \(24, 8\) here, \(16, 8\) received"),
    "number of parameters": ({"depth": 2}, OTHER_STATE + r"\['generator.2.weight'\]: shape \(16, 16\) here, \(16,\)"),
    "dtype": (
        {"dtype": "float64"},
        OTHER_STATE + r"\['generator.0.weight'\]: torch.float64 here, torch.float32 received",
    ),
    "turn": (
        {"turn": 1},
        OTHER_SCRIPT + r" 1860 bytes of float32 \(\w+, bucket 0\) as collective 1 where a and b reduce",
    ),
    "size of the buckets": ({"bucket_mb": 0.0005}, OTHER_SCRIPT + r" \d+ bytes of float32 \(\w+, bucket 0\) as"),
    "dtype of a sum": (
        {"sums": "float64"},
        OTHER_SCRIPT + r" 8 bytes of float64 as collective 2 where (a and b reduce|[ab] reduces) 4",
    ),
}


class Groups:
    """Three replica groups of one rank each, each under a supervisor of its own."""

    def __init__(self, lighthouse: Lighthouse, folder: Path, job: str, *of_c: str) -> None:
        self.lighthouse, self.job, self._folder = lighthouse, job, folder
        for name in NAMES:
            self.write_shape(name)
        self.supervisors = {name: self._supervisor(name, of_c if name == "c" else ()) for name in NAMES}

    def _supervisor(self, name: str, more: Sequence[str]) -> Supervisor:
        ports = ("--master-port", str(free_port()), "--store", "auto", "--store-port", str(free_port()))
        named = ("--job", self.job, "--run-id", self.job)
        paths = [str(self._folder / file) for file in (f"{name}.shape", f"{name}.events", "stop")]
        return Supervisor(
            self.lighthouse.address,
            *(*named, *ports, *DELAYS, *more),
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

    def wait_asked(self, start: int) -> dict[str, Any]:
        """c's script, started so often, builds its Agent and asks for a quorum."""
        starts = eventually(lambda: asked if len(asked := self.events("c", "asks")) > start else [], f"start {start}")
        return starts[start]

    def wait_failed(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The process that has asked then ends, and by which error."""
        eventually(lambda: not Path(f"/proc/{asked['pid']}").exists(), "it ends")
        return self.events("c", "fails", asked["at"])[-1]

    def wait_trained(self, names: str, since: float) -> None:
        """Some steps are committed by just these."""

        def have_trained() -> bool:
            committed = {name: self.events(name, "commits", since) for name in names}
            together = [[step for step in steps if step["participants"] == [*names]] for steps in committed.values()]
            return all(len(steps) >= SOME_STEPS for steps in together)

        try:
            eventually(have_trained, f"{names} train")
        except AssertionError as e:
            logs = "\n".join(f"--- {name}\n{supervisor.log()[-3000:]}" for name, supervisor in self.supervisors.items())
            raise AssertionError(f"{e}\n{logs}\n--- lighthouse\n{self.lighthouse.log()[-3000:]}") from None

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
def three_groups(lighthouse: Lighthouse, folder: Path, job: str, *of_c: str) -> Generator[Groups]:
    groups = Groups(lighthouse, folder, job, *of_c)
    with together(*groups.supervisors.values()):
        groups.wait_trained("abc", 0.0)
        yield groups


def last_line(log: str) -> str:
    """What a rank of c said last before it ended by an exception. A library's bindings may complain after that, of what
    the exception's frames still hold."""
    before, _, _ = log.partition("c/0 died: exit code 1")
    before, _, _ = before.partition("[c/0] nanobind: ")
    return [line for line in before.splitlines() if line.startswith("[c/0] ")][-1]


def test_each_misfit_ends_at_once_with_its_cause_and_costs_the_others_one_step(
    lighthouse: Lighthouse, tmp_path: Path
) -> None:
    with three_groups(
        lighthouse, tmp_path, "misfits", "--max-restarts", "100", "--max-startup-failures", "0"
    ) as groups:
        supervisor = groups.supervisors["c"]
        for start, (differs, cause) in enumerate(MISFITS.values()):
            said = len(supervisor.log())
            groups.write_shape("c", **differs)
            killed_at = groups.kill_rank("c")
            asked = groups.wait_asked(2 * start + 1)
            failed = groups.wait_failed(asked)
            groups.write_shape("c")
            assert failed["at"] - asked["at"] < ENDS_WITHIN_S
            assert cause.startswith(failed["error"])
            supervisor.wait_for_log(rf"attempt {2 * start + 2}")
            assert re.search(cause, last_line(supervisor.log()[said:]))
            groups.check_incident(cause)
            back = groups.wait_asked(2 * start + 2)
            groups.wait_trained("abc", back["at"])
            groups.check_lost(asked["at"], at_most=1)
            groups.check_lost(killed_at, at_most=2)
        groups.end("abc")


@pytest.mark.parametrize(
    ("job", "options", "returns", "why"),
    [
        (
            "budget",
            ("--max-restarts", "3", "--max-startup-failures", "0"),
            3,
            "the budget of 3 restarts within 3600 s is exhausted, 3 of them because this group does not fit its peers",
        ),
        (
            "startup",
            ("--max-restarts", "100", "--max-startup-failures", "3", "--startup-time", "1h"),
            2,
            "start-up failure: 3 deaths in a row within 3600 s of the start",
        ),
    ],
)
def test_one_that_returns_again_and_again_ends_and_the_others_go_on(
    lighthouse: Lighthouse, tmp_path: Path, job: str, options: tuple[str, ...], returns: int, why: str
) -> None:
    """Its first loss is the kill: it counts, too."""
    differs, cause = MISFITS["width"]
    with three_groups(lighthouse, tmp_path, job, *options) as groups:
        groups.write_shape("c", **differs)
        killed_at = groups.kill_rank("c")
        supervisor = groups.supervisors["c"]
        assert supervisor.wait() == 1
        ended_at = time.monotonic()
        assert re.search(rf"exits with 1: {re.escape(why)}; rank 0 died: exit code 1: {cause}", supervisor.log())
        assert len(groups.events("c", "asks", killed_at)) == returns
        groups.wait_trained("ab", ended_at)
        groups.check_lost(killed_at, at_most=1 + returns)
        groups.end("ab")


def test_one_that_reaches_no_source_of_a_state_ends_and_is_named(lighthouse: Lighthouse, tmp_path: Path) -> None:
    """After its own discards; the first one that the others counted would end them."""
    discards = 3
    cause = (
        rf"AgentError: {discards} steps discarded in a row \(max_consecutive_discards\): healing: .*connection refused"
    )
    with three_groups(lighthouse, tmp_path, "cut_off", "--max-startup-failures", "0") as groups:
        groups.write_shape("c", is_cut_off=True, discards=discards)
        groups.kill_rank("c")
        asked = groups.wait_asked(1)
        groups.wait_failed(asked)
        groups.write_shape("c")
        groups.supervisors["c"].wait_for_log(r"attempt 2")
        groups.check_incident(cause)
        back = groups.wait_asked(2)
        groups.wait_trained("abc", back["at"])
        groups.check_lost(asked["at"], at_most=discards)
        groups.end("abc")
