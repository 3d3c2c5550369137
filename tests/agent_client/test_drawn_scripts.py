"""Scripts that nobody wrote: loop, optimizer, fault and way to start are drawn. After every step that several groups
have committed under one quorum they hold the same bits, and no healthy group ends because of another.

`DRAWN_SCRIPTS=50 pytest tests/agent_client/test_drawn_scripts.py -m slow` runs as many from the seed DRAWN_FROM on; by
default it runs new ones for a fixed time. A failure names its draw, which `DRAWN_FROM=seed DRAWN_SCRIPTS=1` repeats.
"""

import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from examples.ports import free_port
from lighthouse.cli.check_history import check as check_rules
from lighthouse.cli.check_history import read
from lighthouse_runtime.process.commands import START_MANAGER
from tests.agent_client.drawn_script import FAULTS, LOOPS, OPTIMIZERS
from tests.processes import LOCALHOST, Lighthouse, Process, clean_environment, eventually

FOR_S = 100.0
STEPS = 120
SCRIPT = str(Path(__file__).with_name("drawn_script.py"))
WAYS = ("own manager", "supervisor", "supervisor of two", "torchrun")
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "pause": signal.SIGSTOP}
_EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Draw:
    seed: int
    loop: str
    optimizer: str
    fault: str
    way: str
    at: tuple[int, ...]

    @classmethod
    def of(cls, seed: int) -> "Draw":
        random_ = random.Random(seed)
        loop, way = random_.choice(LOOPS), random_.choice(WAYS)
        optimizer = random_.choice([name for name in OPTIMIZERS if loop != "scaler" or name != "two"])
        faults = [*FAULTS, *SIGNALS]
        fault = random_.choice([name for name in faults if loop != "scaler" or not name.startswith("skip")])
        return cls(seed, loop, optimizer, fault, way, tuple(sorted(random_.sample(range(5, STEPS // 2), 3))))

    def script(self, *, is_faulty: bool) -> str:
        fault = self.fault if is_faulty and self.fault in FAULTS else "none"
        given = {name: value for name, value in asdict(self).items() if name in ("loop", "optimizer", "at")}
        at = self.at[:1] if fault == "exit" else self.at
        return json.dumps({**given, "fault": fault, "at": at, "steps": STEPS})


class Group:
    """Its processes, started again when they end before the last step, as whoever runs a job does."""

    def __init__(self, name: str, draw: Draw, lighthouse: Lighthouse, folder: Path, *, is_faulty: bool) -> None:
        self.name, self._folder, self.starts = name, folder, 0
        self._env = clean_environment(
            DRAW=draw.script(is_faulty=is_faulty),
            EVENTS=str(folder),
            LIGHTHOUSE_TRACE_DIR=str(folder / "history"),
            REPLICA_GROUP_ID=name,
            LIGHTHOUSE_ADDRESS=lighthouse.address,
            LIGHTHOUSE_MANAGER_ADVERTISE=LOCALHOST,
            OMP_NUM_THREADS="1",
        )
        two = ["--nproc-per-node", "2"] if draw.way == "supervisor of two" else []
        run = [sys.executable, "-P", "-c", START_MANAGER, "run", "--bind", f"{LOCALHOST}:0", "--restart-delay", "0.1s"]
        self._command = {
            "own manager": lambda: [sys.executable, SCRIPT],
            "torchrun": lambda: [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"),
                *(f"--master-port={free_port()}", SCRIPT),
            ],
        }.get(draw.way, lambda: [*run, *two, "--master-port", str(free_port()), "--", SCRIPT])
        self.process: Process
        self.statuses: list[int] = []
        self.has_finished = False

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as self._stack:
            self.start()
            yield

    def start(self) -> None:
        self.starts += 1
        env = {
            **self._env,
            "DRAW": self._env["DRAW"] if self.starts == 1 else self._env["DRAW"].replace('"exit"', '"none"'),
        }
        self.process = self._stack.enter_context(Process(_EXEC, self._command(), env=env))

    def steps(self) -> list[dict[str, object]]:
        lines = (line for file in self._folder.glob(f"{self.name}-*") for line in file.read_text().splitlines())
        return [json.loads(line) for line in lines]

    def reached(self) -> int:
        return max((int(str(each["step"])) for each in self.steps()), default=0)

    def ranks(self) -> list[int]:
        """The processes that train, below whatever has started them."""
        return [int(file.name.rpartition("-")[2]) for file in self._folder.glob(f"{self.name}-*")]

    def has_ended(self) -> bool:
        if self.process.is_alive:
            return False
        if self.has_finished:
            return True
        self.statuses.append(self.process.popen.returncode)
        if self.statuses[-1] != 0 and self.starts < 3:
            self.start()
            return False
        self.has_finished = True
        return True


def check(draw: Draw, folder: Path) -> None:
    with Lighthouse("--join-timeout", "10s", "--heartbeat-timeout", "3s", "--min-replicas", "1") as lighthouse:
        a = Group("a", draw, lighthouse, folder, is_faulty=False)
        b = Group("b", draw, lighthouse, folder, is_faulty=True)
        with a.running(), b.running():
            try:
                trouble(draw, b)
                eventually(lambda: a.has_ended() & b.has_ended(), "both have ended", 240.0)
            except BaseException:
                print(lighthouse.log()[-4000:])
                raise
            finally:
                for group in (a, b):
                    print(f"== {group.name} {group.statuses}\n{group.process.log()[-6000:]}")
            (folder / "history" / "lighthouse.log").write_text(lighthouse.log())
        rules = check_rules(read(folder / "history"), skew_s=0.5)
        assert [broken for rule in rules for broken in rule.violations] == []
        assert rules[0].checks >= STEPS - 1
        assert a.statuses == [0], "a healthy group ends by nothing but its own end"
        assert b.statuses[-1] == 0
        assert a.reached() == STEPS
        held: dict[tuple[object, object], set[object]] = defaultdict(set)
        for each in (*a.steps(), *b.steps()):
            held[each["step"], each["quorum"]].add(each["digest"])
        assert [at for at, digests in held.items() if len(digests) > 1] == []
        assert len(held) >= STEPS


def trouble(draw: Draw, group: Group) -> None:
    """Signals come from outside, when the group has come to the step."""
    if draw.fault not in SIGNALS:
        return
    eventually(lambda: group.reached() >= draw.at[0] or group.has_ended(), "the step of the fault", 120.0)
    target = group.ranks() if draw.fault != "term" else [group.process.pid]
    for pid in target:
        with_exit(pid, SIGNALS[draw.fault])
    if draw.fault == "pause":
        time.sleep(1.0)
        for pid in target:
            with_exit(pid, signal.SIGCONT)


def with_exit(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.mark.slow
def test_drawn_scripts_keep_their_groups_equal(tmp_path: Path) -> None:
    count, seed = int(os.environ.get("DRAWN_SCRIPTS", "0")), int(os.environ.get("DRAWN_FROM", str(int(time.time()))))
    ends_at, done = time.monotonic() + FOR_S, 0
    while done < count if count else time.monotonic() < ends_at:
        draw = Draw.of(seed + done)
        print(f"\n==== {draw}")
        folder = tmp_path / str(draw.seed)
        folder.mkdir()
        try:
            check(draw, folder)
        except AssertionError as e:
            raise AssertionError(f"DRAWN_FROM={draw.seed} DRAWN_SCRIPTS=1: {draw}: {e}") from e
        done += 1
    assert done
