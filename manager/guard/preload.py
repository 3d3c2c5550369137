"""Run by the interpreter of the ranks: it imports what they have in common, and each rank is forked from it.

    python [OPTIONS] preload.py DESCRIPTOR GUARD MODULE,MODULE.. (SCRIPT | -m MODULE) ARGS...

The socket DESCRIPTOR says {"ready": true}, or {"failed": "why"}. A byte on it, with the rank's own socket and where
its output goes, forks a rank. That one says its pid on its own socket, and becomes the rank by the order that it reads
there: {"env": {...}, "mark": "..."}.

The rank is a child of the guard, as one that the guard has started itself: what is between them ends at once. A file
that stands alone, since the ranks' interpreter must find nothing of ours among its modules.
"""

import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

MARK_VARIABLE = "LIGHTHOUSE_TREE"
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16
_ADOPTED_AFTER_S = 0.0005
_LIBC = ctypes.CDLL(None)
_LIBC.getenv.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Rank:
    """What a forked process is given: its own socket, and where its output goes."""

    socket: socket.socket
    output: int


def die_with(parent: int) -> None:
    """The kernel kills this process when `parent` ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def as_main(program: Sequence[str]) -> Callable[[], object]:
    """What runs a script, or -m and a module, as Python itself does: as __main__, with its sys.argv.

    To be called at the top, so that nothing of ours stands in a traceback. Ends the process if there is no such script.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if program[0] == "-m":
        sys.argv = ["-m", *program[2:]]
        run_as_main: Callable[..., object] = runpy._run_module_as_main  # type: ignore[attr-defined]
        return functools.partial(run_as_main, program[1])  # what `python -m` calls, too
    sys.argv = list(program)
    path = os.path.abspath(program[0])
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as e:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {e.errno}] {e.strerror}", file=sys.stderr)
        sys.exit(2)
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    return functools.partial(exec, code, main.__dict__)


def set_first_path(program: Sequence[str]) -> None:
    """Where Python looks first for this program's modules."""
    first = os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))
    if sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first


def draw_anew() -> None:
    """As in a process of its own: random reseeds itself after a fork, numpy does not, torch begins with a constant."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _import(modules: Sequence[str]) -> str:
    """Why that is not possible; nothing if it is."""
    before = _threads()
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as e:  # noqa: BLE001  whatever it is, it is told
            traceback.print_exc()
            return f"{name}: {type(e).__name__}: {e}"
        started = sorted(set(_threads().items()) - set(before.items()))
        before = _threads()
        if started:
            names = ", ".join(thread for _, thread in started)
            print(
                f"WARNING: the import of {name} has started {len(started)} threads ({names}), which no rank that is "
                "forked has: set OMP_NUM_THREADS=1 if they compute, or leave it out of --preload",
                file=sys.stderr,
                flush=True,
            )
    return ""


def _threads() -> Mapping[str, str]:
    """Their names."""
    found: dict[str, str] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[task.name] = (task / "comm").read_text().strip()
    return found


def _wait(control: socket.socket, guard: int) -> Rank:
    """Returns in each process that is to become a rank; here never."""
    while True:
        said, descriptors, _, _ = socket.recv_fds(control, 1, 2, socket.MSG_CMSG_CLOEXEC)
        if not said:
            os._exit(0)
        rank = Rank(socket.socket(fileno=descriptors[0]), descriptors[1])
        if _fork(guard):
            control.close()
            return rank
        rank.socket.close()
        os.close(rank.output)


def _fork(guard: int) -> bool:
    """Whether this is the new process. It is the child of the guard: the next subreaper above one that ends at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(_ADOPTED_AFTER_S)
    die_with(guard)
    return True


def _become(rank: Rank, began_with: Mapping[str, str], mark_at: int) -> None:
    """`began_with`: the environment before the imports; what they have changed holds, unless the rank has its own.

    `mark_at`: where the kernel reads this process's mark.
    """
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (rank.output, 1), (rank.output, 2)):
        os.dup2(source, target)
        os.set_inheritable(target, True)
    os.close(nothing)
    os.close(rank.output)
    rank.socket.sendall(str(os.getpid()).encode())
    with rank.socket:
        said = b"".join(iter(lambda: rank.socket.recv(_READ_BYTES), b""))
    if not said:
        os._exit(1)
    order = json.loads(said)
    mark = order["mark"].encode()
    ctypes.memmove(mark_at, mark, len(mark))
    own: Mapping[str, str] = order["env"]
    os.environ.update({name: value for name, value in own.items() if began_with.get(name) != value})
    draw_anew()


def main() -> Callable[[], object]:
    """Returns in each rank, with what it is to call."""
    descriptor, guard, modules, *program = sys.argv[1:]
    sys.orig_argv[len(sys.orig_argv) - len(sys.argv) :] = program
    began_with = dict(os.environ)
    mark_at: int = _LIBC.getenv(MARK_VARIABLE.encode())
    control = socket.socket(fileno=int(descriptor))
    os.set_inheritable(control.fileno(), False)
    set_first_path(program)
    sys.argv = ["-m" if program[0] == "-m" else program[0], *program[2 if program[0] == "-m" else 1 :]]
    why = _import(modules.split(","))
    said = {"failed": why} if why else {"ready": True}
    control.sendall(json.dumps(said).encode() + b"\n")
    if why:
        os._exit(1)
    gc.collect()
    gc.freeze()  # else the first collection of each rank copies all of it
    _become(_wait(control, int(guard)), began_with, mark_at)
    return as_main(program)


if __name__ == "__main__":
    main()()
