"""Entry points: `lighthouse`, `lighthouse-manager`, `torchft_lighthouse` and the container health check.

PYTHONPATH or the working directory may put a project's own `lighthouse` or `manager` package first on sys.path. So the
entry points are in this package, whose name is unique, and load our two packages by path. Training processes import
neither.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from lighthouse_protocol.limits import LIGHTHOUSE_HTTP_PORT

_GC_THRESHOLD = 100_000
_OURS = Path(__file__).resolve().parents[2]

# Source code for `python -c` that starts a daemon as a child.
START_LIGHTHOUSE = f"from {__name__} import lighthouse; lighthouse()"
START_MANAGER = f"from {__name__} import lighthouse_manager; lighthouse_manager()"


def lighthouse() -> None:
    _run("lighthouse.cli", "lighthouse")


def lighthouse_manager() -> None:
    _run("manager.cli", "lighthouse-manager")


def torchft_lighthouse() -> None:
    _run("lighthouse.cli.serve", "torchft_lighthouse")


def _run(module: str, name: str) -> None:
    has_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # False in a background job
    if has_interrupts:  # Ctrl-C during the imports ends this process without a traceback; later, click handles it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _reset_inherited_state()
    if os.getpid() == 1:
        _run_under_init()
    # Imports allocate much and free nothing, and a process that exits needs no collection: a fifth of `status`'s time.
    gc.set_threshold(_GC_THRESHOLD)  # daemons set their own
    atexit.register(gc.freeze)
    _load(module.partition(".")[0])
    command = importlib.import_module(module).main
    if has_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command(prog_name=name)
    except OSError as e:
        _check_stdout(e)
        raise


def _check_stdout(error: OSError) -> None:
    """Exit with an error message if stdout does not accept output. --help and --version do not handle `error`."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit fails
        sys.exit(f"Error: cannot write to stdout: {error.strerror or error}")


def _reset_inherited_state() -> None:
    """Reset file descriptors and signals that a parent may have left in an unusable state.

    - Reopen closed standard streams, or the next socket would get their number.
    - Unblock signals, or they could not stop a daemon.
    - Stop ignoring SIGCHLD, or the kernel would discard the exit statuses of child processes, and pid 1 of a container
      (`_run_under_init`) would never notice the end of its child.
    - Ignore SIGUSR1 and SIGUSR2 (Slurm's --signal=USR1@120), which would kill this process. A supervisor handles them
      later.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _run_under_init() -> None:
    """Fork, and return in the child only. The parent, which is pid 1, acts as the container's init process.

    It forwards signals to the child and reaps orphans, which kubectl exec may leave. A daemon that reaped orphans
    itself would steal the exit statuses of its own children.
    """
    signals = signal.valid_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # otherwise a terminal's Ctrl-C would arrive twice
        with contextlib.suppress(OSError):  # standard input is not a terminal
            os.tcsetpgrp(0, os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return
    while True:
        number = signal.sigwait(signals)
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                os._exit(code if code >= 0 else 128 - code)


def _load(package: str) -> None:
    """Import one of our packages by path. Later imports of the package's modules use the same path."""
    folder = _OURS / package
    spec = importlib.util.spec_from_file_location(
        package, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[package] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


# Health check of the container image: `python -m lighthouse_runtime.process.commands`.
#
# The options of the daemon decide between HTTPS and HTTP on port 29511, so the check tries both. It trusts any
# certificate because the connection is on the loopback.

_TIMEOUT_S = 1.0


def is_alive(host: str = "127.0.0.1", port: int = LIGHTHOUSE_HTTP_PORT) -> bool:
    import http.client  # slow to import, and the commands above do not need it
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for connection in (
        http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context),
        http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S),
    ):
        try:
            connection.request("GET", "/livez")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return False


if __name__ == "__main__":
    sys.exit(0 if is_alive() else 1)


# Installed versions, found without importing the packages.

PACKAGES = ("lighthouse-ft", "grpcio", "protobuf", "aiohttp", "prometheus-client", "uvloop", "torch")
NOT_INSTALLED = "not installed"
OLDEST_TORCH = "2.9"  # as in pyproject.toml: gloo of 2.8 ignores the timeout of a single collective


def installed_versions() -> Mapping[str, str]:
    """Return the installed versions of PACKAGES, in the same order."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
