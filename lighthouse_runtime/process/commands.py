"""The commands `lighthouse`, `lighthouse-manager` and `torchft_lighthouse`.

A project may have a `lighthouse` or a `manager` of its own, and PYTHONPATH or the working directory may stand before
ours. So a daemon starts here, under a name that is ours alone, and takes those two packages from our folder, wherever
that stands on sys.path. Training processes import neither.
"""

import atexit
import contextlib
import gc
import http.client
import importlib
import importlib.util
import os
import signal
import ssl
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from lighthouse_protocol.limits import LIGHTHOUSE_HTTP_PORT

_GC_THRESHOLD = 100_000
_OURS = Path(__file__).resolve().parents[2]

START_LIGHTHOUSE = f"from {__name__} import lighthouse; lighthouse()"
"""What `python -c` runs to start a daemon as a child."""
START_MANAGER = f"from {__name__} import lighthouse_manager; lighthouse_manager()"


def lighthouse() -> None:
    _run("lighthouse.cli", "lighthouse")


def lighthouse_manager() -> None:
    _run("manager.cli", "lighthouse-manager")


def torchft_lighthouse() -> None:
    _run("lighthouse.cli.serve", "torchft_lighthouse")


def _run(module: str, name: str) -> None:
    _mend_inheritance()
    if os.getpid() == 1:
        _leave_to_init()
    # Imports allocate much and free nothing, and what ends needs no collection: a fifth of what `status` takes.
    gc.set_threshold(_GC_THRESHOLD)  # daemons set their own
    atexit.register(gc.freeze)
    _load(module.partition(".")[0])
    importlib.import_module(module).main(prog_name=name)


def _mend_inheritance() -> None:
    """Undo what a parent can leave behind that a daemon cannot live with.

    A closed standard stream would give its number to the next socket. A blocked signal would stop no daemon. SIGUSR1
    and SIGUSR2 (Slurm's --signal=USR1@120) would end it; a supervisor passes them on to its ranks.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, so this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _leave_to_init() -> None:
    """Return in a child; this process, the first one of a container, passes signals on to it and reaps all orphans.

    They come to the first process of a pid namespace (kubectl exec leaves some), and stay zombies until it waits for
    them. A daemon itself cannot: it would take the exit statuses that its own parts wait for.
    """
    signals = signal.valid_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # a terminal's Ctrl-C comes once
        with contextlib.suppress(OSError):  # standard input is no terminal
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
    """Import it from our folder: its modules are then found there, too."""
    folder = _OURS / package
    spec = importlib.util.spec_from_file_location(
        package, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[package] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


# -- healthcheck --------------------------------------------------------------
#
# `python -m lighthouse_runtime.process.commands`: whether a daemon in this container lives, for its image.
#
# It asks /livez on port 29511, by HTTPS and by HTTP: which one a daemon serves depends on its options, and who
# answers does not matter on a loopback.

_TIMEOUT_S = 1.0


def is_alive(host: str = "127.0.0.1", port: int = LIGHTHOUSE_HTTP_PORT) -> bool:
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


# -- packages -----------------------------------------------------------------
#
# Which versions are installed here, without importing any of them.

PACKAGES = ("lighthouse-ft", "grpcio", "protobuf", "aiohttp", "prometheus-client", "uvloop", "torch")
NOT_INSTALLED = "not installed"
OLDEST_TORCH = "2.8"
"""As in pyproject.toml: an older TCPStore does not take a socket that already listens."""


def installed_versions() -> Mapping[str, str]:
    """Of PACKAGES, in their order."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
