"""Our daemons, and any Python program, as real processes on loopback.

    with Lighthouse("--min-replicas", "2") as lighthouse, Manager(lighthouse.address) as manager: ...

A process that is entered serves. It is killed and reaped when its block ends, and by the kernel if the tests
themselves are killed. What it writes goes to a file without a name, so that nothing is left behind.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from lighthouse_runtime.process.commands import START_LIGHTHOUSE, START_MANAGER

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
LOCALHOST = "127.0.0.1"

# A bound that no machine under load passes by chance; a healthy test is through in a fraction of it.
PATIENCE_S = 120.0
_POLL_S = 0.01

# What would change a daemon under test from outside.
_OWN_VARIABLES = re.compile(
    r"(LIGHTHOUSE|TORCHFT)_.*|REPLICA_GROUP_ID|NUM_REPLICA_GROUPS|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|GRPC_.*|(https?|no|grpc|all)_proxy",
    re.IGNORECASE,
)

# The kernel kills the child when the thread that started it ends, so nothing outlives the tests.
_DIE_WITH_PARENT = (
    f"from lighthouse_runtime.process.children import die_with_parent; die_with_parent({os.getpid()}, 9)\n"
)


def eventually(look: Callable[[], T], what: str = "", within_s: float = PATIENCE_S) -> T:
    """The first true answer of `look`; an AssertionError that says `what` was waited for if there is none in time."""
    ends_at = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < ends_at, f"not within {within_s:g} s: {what or look}; last seen: {found!r}"
        time.sleep(_POLL_S)
    return found


def clean_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _OWN_VARIABLES.fullmatch(name)}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | more


class Process:
    """`code` run by this interpreter, or `command`; standard output and error together are its log."""

    def __init__(
        self,
        code: str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        **popen: Any,
    ) -> None:
        self._command = [*prefix, sys.executable, "-c", _DIE_WITH_PARENT + code, *arguments]
        self._env = clean_environment(**(env or {}))
        self._popen_options = {"stdin": subprocess.DEVNULL} | popen
        self._stack = contextlib.ExitStack()
        self.popen: subprocess.Popen[str]

    def __enter__(self) -> Self:
        try:
            self.launch()
            self.ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self) -> None:
        """Start it; `close` must follow."""
        self._log = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        options: dict[str, Any] = {"stdout": self._log, "stderr": self._log, "text": True} | self._popen_options
        self.popen = subprocess.Popen(self._command, cwd=ROOT, env=self._env, **options)
        self._stack.callback(_end, self.popen)

    def ready(self) -> None:
        """Return when it serves."""

    def close(self) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def log(self) -> str:
        """All that it has written so far."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def wait_for_log(self, pattern: str, within_s: float = PATIENCE_S) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            ended = not self.is_alive
            found = re.search(pattern, self.log(), re.MULTILINE)
            assert found or not ended, f"ended with {self.popen.returncode} without {pattern!r}:\n{self.log()}"
            return found

        try:
            return eventually(look, within_s=within_s)
        except AssertionError as e:
            raise AssertionError(f"no {pattern!r} in the log: {e}\n{self.log()}") from None

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Its exit status, once it died: itself."""
        try:
            return self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.pid} goes on after {within_s:g} s:\n{self.log()}") from None

    def stop(self, within_s: float = PATIENCE_S) -> int:
        """SIGTERM; its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(within_s)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.popen.kill()
        self.popen.wait(PATIENCE_S)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)


@contextlib.contextmanager
def serving(*command: str, folder: Path, **env: str) -> Iterator[str]:
    """The address of a lighthouse that `command`, an installed program, serves from `folder`, where its log is, too."""
    ports = ("--bind", f"{LOCALHOST}:0", "--http", f"{LOCALHOST}:0", "--journal", "none")
    log = folder / "lighthouse.log"
    with log.open("w") as output:
        options: dict[str, Any] = {"cwd": folder, "stdout": output, "stderr": output}
        process = subprocess.Popen([*command, *ports], env=clean_environment(**env), **options)
    try:
        port = eventually(lambda: re.search(r"serves gRPC on port (\d+)", log.read_text()), "it serves")
        yield f"{LOCALHOST}:{port[1]}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


P = TypeVar("P", bound=Process)


@contextlib.contextmanager
def together(*processes: P) -> Iterator[tuple[P, ...]]:
    """All of them, started side by side."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.close)
            process.launch()
        for process in processes:
            process.ready()
        yield processes


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait(PATIENCE_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


LIGHTHOUSE_CODE = START_LIGHTHOUSE
MANAGER_CODE = START_MANAGER
TORCHFT_LIGHTHOUSE_CODE = "from lighthouse_runtime.process.commands import torchft_lighthouse; torchft_lighthouse()"


def _with_defaults(options: Sequence[str], env: Mapping[str, str], prefix: str, **defaults: str) -> list[str]:
    """`options`, and each default that neither they nor `env` set."""
    given = {option.partition("=")[0].replace("_", "-") for option in options}
    missing = {
        name: value
        for name, value in defaults.items()
        if f"--{name.replace('_', '-')}" not in given and f"{prefix}_{name.upper()}" not in env
    }
    return [*options, *(part for name, value in missing.items() for part in (f"--{name.replace('_', '-')}", value))]


class Lighthouse(Process):
    """`lighthouse serve` with `options`; on free ports of 127.0.0.1 unless they say otherwise."""

    def __init__(
        self, *options: str, env: Mapping[str, str] | None = None, code: str = LIGHTHOUSE_CODE, **more: Any
    ) -> None:
        verb = ["serve"] if code == LIGHTHOUSE_CODE else []
        chosen = _with_defaults(
            options, env or {}, "LIGHTHOUSE", bind=f"{LOCALHOST}:0", http=f"{LOCALHOST}:0", journal="none"
        )
        super().__init__(code, [*verb, *chosen], env=env, **more)
        self.host = LOCALHOST

    def ready(self) -> None:
        ports = self.wait_for_log(r"serves gRPC on port (\d+), HTTP on port (\d+)")
        self.port, self.http_port = int(ports[1]), int(ports[2])

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def http(self) -> str:
        return f"http://{self.host}:{self.http_port}"


class Manager(Process):
    """`lighthouse-manager serve` with `options`: on a free port of 127.0.0.1, and with a store that is only a name
    (`store="auto"` hosts one), unless they say otherwise. `lighthouse` None: the environment names it."""

    def __init__(
        self,
        lighthouse: str | None,
        replica_id: str | None = "a",
        *options: str,
        ranks: int | None = 1,
        store: str = f"{LOCALHOST}:1",
        env: Mapping[str, str] | None = None,
        code: str = MANAGER_CODE,
        **more: Any,
    ) -> None:
        is_routable = any(option.startswith("--advertise") for option in options)
        named = {"--lighthouse": lighthouse, "--replica-id": replica_id, "--group-world-size": ranks}
        given = [part for name, value in named.items() if value is not None for part in (name, str(value))]
        chosen = _with_defaults(
            options,
            env or {},
            "LIGHTHOUSE_MANAGER",
            bind="[::]:0" if is_routable else f"{LOCALHOST}:0",
            advertise=LOCALHOST,
            store=store,
            http=f"{LOCALHOST}:0",
        )
        super().__init__(code, ["serve", *given, *chosen], env=env, **more)

    def ready(self) -> None:
        said = self.wait_for_log(r"\) serves on (\S+); store (\S+);", 2 * PATIENCE_S)
        self.address, self.store_address = said[1], said[2]
        told = re.search(r"serves HTTP on port (\d+)", self.log())
        self._http_port = int(told[1]) if told else 0

    @property
    def http(self) -> str:
        return f"http://{LOCALHOST}:{self._http_port}"


def run_cli(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """A command of ours that ends by itself."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=clean_environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def http_get(url: str) -> tuple[int, str]:
    """(status, body)."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()


def http_json(url: str) -> Any:
    return json.loads(http_get(url)[1])
