"""Ranks that are forked from a preloaded interpreter, as the supervisor's end of the guard sees them."""

import asyncio
import json
import os
import selectors
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from manager.guard import process_tree
from manager.guard.child import Child
from manager.guard.client import Command, Ended, GuardClient, Preload
from manager.guard.preloader import Hooks, Preloader
from manager.guard.rules import read_python
from tests.processes import PATIENCE_S, eventually

SLEEP = "import time; time.sleep(600)"


class Ranks:
    """Those of one command."""

    def __init__(self, guard: GuardClient, command: tuple[str, ...]) -> None:
        self.guard = guard
        self.failures: list[str] = []
        self._command = command
        guard.on_failure = self.failures.append

    def start(self, *, is_forked: bool = True, **env: str) -> tuple[int, "asyncio.Future[Ended]"]:
        ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        command = Command(self._command, env, "a/0", is_shown=False, is_forked=is_forked)
        return self.guard.start(command, ended.set_result), ended

    async def run(self, *, is_forked: bool = True, **env: str) -> Ended:
        async with asyncio.timeout(PATIENCE_S):
            return await self.start(is_forked=is_forked, **env)[1]

    async def pid(self, number: int) -> int:
        """Of the process itself: it leads the session of what it starts."""
        marks = f"{self.guard.pid}.{number:08d}."
        return await until(lambda: min(process_tree.marked(os.getpid(), marks), default=0))


@asynccontextmanager
async def preloaded(*command: str, modules: tuple[str, ...] = ("decimal",)) -> AsyncIterator[Ranks]:
    guard = GuardClient(Preload(modules, read_python(command), "a/preload"))
    task = asyncio.create_task(guard.run())
    try:
        yield Ranks(guard, command)
    finally:
        await guard.stop()
        await task


async def until(look: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(eventually, look)


def script(folder: Path, code: str) -> str:
    path = folder / "train.py"
    path.write_text(code)
    return str(path)


def preloaded_script(folder: Path, code: str, *modules: str, **written: str) -> AbstractAsyncContextManager[Ranks]:
    """`written`: further modules, by their code."""
    for name, text in written.items():
        (folder / f"{name}.py").write_text(text)
    return preloaded(sys.executable, script(folder, code), modules=(*modules, *written) or ("decimal",))


def interpreter(guard: GuardClient) -> int:
    """The process that has imported the modules: the child of the guard with the mark of none."""
    children = Path(f"/proc/{guard.pid}/task/{guard.pid}/children")
    sign = f"LIGHTHOUSE_TREE={guard.pid}.00000000.".encode()
    found = [int(pid) for pid in children.read_text().split() if sign in process_tree.environment(int(pid))]
    return found[0] if found else 0


# What a process sees of itself. What differs by nature is left out: pids, and the values that must be new.
SEEN = """
import json, os, pickle, signal, sys, threading
value: int = 1
class Held: pass
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
with open(os.environ.pop("SEEN"), "w") as file: json.dump({
    "name": __name__, "file": __file__, "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path,
    "flags": sys.flags,
    "builtins": __builtins__.__name__, "spec": getattr(__spec__, "name", None), "package": __package__, "doc": __doc__,
    "main": sys.modules["__main__"].Held is Held, "pickled": type(pickle.loads(pickle.dumps(Held()))) is Held,
    "globals": sorted(globals()), "ours": sorted(m for m in sys.modules if m.split(".")[0] == "manager"),
    "env": {k: v for k, v in os.environ.items() if k not in ("LIGHTHOUSE_TREE", "TORCHELASTIC_ERROR_FILE")},
    "mark": os.environ["LIGHTHOUSE_TREE"] in open("/proc/self/environ").read(),
    "leads": os.getpid() == os.getpgid(0) == os.getsid(0),
    "parent": os.environ["LIGHTHOUSE_TREE"].split(".")[0] == stat[1],
    "cwd": os.getcwd(), "threads": len(os.listdir("/proc/self/task")), "main_thread": threading.current_thread().name,
    "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "blocked": [str(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "input": sys.stdin.read(), "fds": len(os.listdir("/proc/self/fd")), "buffered": sys.stdout.line_buffering,
    "is_one": os.fstat(1).st_ino == os.fstat(2).st_ino,
}, file, default=str)
"""


@pytest.mark.parametrize(("flags", "is_module"), [((), False), (("-P",), False), (("-u", "-B"), True)])
async def test_a_rank_sees_what_it_would_as_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], is_module: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script(tmp_path, SEEN)
    command = (sys.executable, *flags, *(("-m", "train") if is_module else ("train.py",)), "--lr", "0.1")
    async with preloaded(*command) as ranks:
        assert (await ranks.run(RANK="0", SEEN="forked")).status == 0
        assert (await ranks.run(is_forked=False, RANK="0", SEEN="started")).status == 0
    forked, started = (json.loads((tmp_path / name).read_text()) for name in ("forked", "started"))
    assert forked == started
    assert forked["mark"] == forked["leads"] == forked["parent"] == forked["main"] is True


class TestEnds:
    @pytest.mark.parametrize(
        ("code", "status", "last"),
        [
            ("print('done')", 0, "done"),
            ("raise ValueError('loss is nan')", 1, "ValueError: loss is nan"),
            ("import sys; sys.exit(130)", 130, None),
            ("import sys; sys.exit('no data')", 1, "no data"),
            ("import os; os.kill(os.getpid(), 9)", -9, None),
            ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt"),
            ("import os; os._exit(7)", 7, None),
            ("import atexit, threading, time\n"
             "atexit.register(print, 'at the end')\n"
             "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()", 0, "at the end"),
        ],
    )  # fmt: skip
    async def test_a_script(self, tmp_path: Path, code: str, status: int, last: str | None) -> None:
        async with preloaded_script(tmp_path, code) as ranks:
            ended = await ranks.run()
        assert ended.status == status, ended
        assert (ended.output[-1] if ended.output else None) == last

    async def test_no_such_script_or_module(self, tmp_path: Path) -> None:
        async with preloaded(sys.executable, str(tmp_path / "none.py")) as ranks:
            ended = await ranks.run()
            assert ended.status == 2
            assert "can't open file" in ended.output[-1]
        async with preloaded(sys.executable, "-m", "no_such_module") as ranks:
            ended = await ranks.run()
            assert (ended.status, ended.output[-1]) == (1, f"{sys.executable}: No module named no_such_module")


async def test_each_rank_draws_its_own_numbers(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    code = "import random, uuid, numpy; print(random.random(), numpy.random.rand(), uuid.uuid4())"
    async with preloaded_script(tmp_path, code, "random", "numpy.random") as ranks:
        drawn = [number for _ in range(2) for number in (await ranks.run()).output[0].split()]
    assert len(set(drawn)) == 6


async def test_what_an_import_sets_in_the_environment_holds_and_the_rank_s_own_comes_first(tmp_path: Path) -> None:
    sets = "import os; os.environ.update(SET='import', RANK='import')"
    async with preloaded_script(
        tmp_path, "import os; print(os.environ['SET'], os.environ['RANK'])", sets=sets
    ) as ranks:
        assert (await ranks.run(RANK="3")).output == ("import 3",)


class TestFailures:
    @pytest.mark.parametrize(
        ("name", "code", "why"),
        [
            ("broken", "1 / 0", "broken: ZeroDivisionError: division by zero"),
            ("ends", "import sys; sys.exit(3)", "ends: SystemExit: 3"),
            ("dies", "import os; os._exit(9)", "their import has ended the interpreter by exit code 9, 3 times"),
        ],
    )
    async def test_a_module_that_cannot_be_imported(self, tmp_path: Path, name: str, code: str, why: str) -> None:
        async with preloaded_script(tmp_path, "pass", "json", **{name: code}) as ranks:
            await until(lambda: ranks.failures)
            (said,) = ranks.failures
        assert said.startswith("cannot preload ")
        assert why in said

    async def test_a_dead_interpreter_is_started_again_and_its_ranks_go_on(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('went on')"
        async with preloaded_script(tmp_path, code) as ranks:
            for _ in range(4):  # more often than a failure is borne: none has been at an import
                number, ended = ranks.start()
                rank = await ranks.pid(number)
                os.kill(await until(lambda: interpreter(ranks.guard)), signal.SIGKILL)
                again = await ranks.pid(ranks.start()[0])
                assert again != rank
                assert not ended.done()
            go.touch()
            async with asyncio.timeout(PATIENCE_S):
                assert await ended == Ended(0, ("went on",))
            assert ranks.failures == []

    async def test_one_that_waits_for_the_import_can_be_halted(self, tmp_path: Path) -> None:
        async with preloaded_script(tmp_path, "pass", slow=SLEEP) as ranks:
            number, ended = ranks.start()
            ranks.guard.halt(number, 10.0)
            async with asyncio.timeout(PATIENCE_S):
                assert await ended == Ended(-signal.SIGTERM, ())

    async def test_those_that_are_just_forked_can_be_halted(self, tmp_path: Path) -> None:
        async with preloaded_script(tmp_path, SLEEP) as ranks:
            await ranks.pid(ranks.start()[0])
            started = [ranks.start() for _ in range(5)]
            for number, _ in started:
                ranks.guard.halt(number, 0.0)
            async with asyncio.timeout(PATIENCE_S):
                ends = await asyncio.gather(*(ended for _, ended in started))
            assert {end.status for end in ends} <= {-signal.SIGTERM, -signal.SIGKILL}
            await ranks.pid(ranks.start()[0])


async def test_threads_of_an_import_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pool = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    async with preloaded_script(tmp_path, "pass", "json", pool=pool) as ranks:
        assert (await ranks.run()).status == 0
    assert "[a/preload] WARNING: the import of pool has started 1 threads" in capfd.readouterr().out


async def test_nothing_is_left_when_the_guard_is_killed(tmp_path: Path) -> None:
    async with preloaded_script(tmp_path, SLEEP) as ranks:
        pids = [await ranks.pid(ranks.start()[0]), await until(lambda: interpreter(ranks.guard))]
        os.kill(ranks.guard.pid, signal.SIGKILL)
        await until(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_it_said_before_its_end_counts_though_the_end_is_seen_first(tmp_path: Path) -> None:
    kept: list[Child] = []
    failures: list[str] = []
    said: list[str] = []
    order = {"interpreter": [sys.executable], "program": ["x.py"], "preload": ["no_such"], "label": "a/preload"}
    with selectors.DefaultSelector() as selector:
        preloader = Preloader(
            order, tmp_path, selector, Hooks(kept.append, failures.append, lambda _, text: said.append(text))
        )
        preloader.begin()
        [child] = kept
        assert child.popen is not None
        preloader.ended(child.popen.wait(PATIENCE_S))
        child.close()
    assert [failure.partition(":")[0] for failure in failures] == ["no_such"]
    assert said == []
