"""A daemon of ours as a child process, which looks to its owner like a server in a thread of its own.

The thread that starts the child also waits for it, and lasts as long: the kernel ends the child with the thread that
started it, and a server may outlive the thread in which it was made.
"""

import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class ServerProcess:
    """`serve` is Python that runs the console command; `options` go to its verb `serve`. Ends with its last reference.

    `variables` are set for the child beside ours: what no other user may read in its command line. `announced` is the
    line that the daemon says once it serves. `on_end` is called with the status of a child that nobody has asked to
    stop. Raises RuntimeError if it does not come up; its own output has said why.
    """

    def __init__(
        self,
        serve: str,
        options: Mapping[str, str],
        on_end: Callable[[int], None] | None = None,
        *,
        name: str = "the server",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._child = _Child(serve, options, on_end or (lambda status: None), name, variables or {})
        threading.Thread(target=self._child.run, name="lighthouse server", daemon=True).start()
        self.announced = self._child.announced.result()
        self._finalizer = weakref.finalize(self, self._child.stop)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    def stop(self) -> None:
        """Returns when it has ended; more than once does no harm."""
        self._finalizer()


class _Child:
    def __init__(
        self,
        serve: str,
        options: Mapping[str, str],
        on_end: Callable[[int], None],
        name: str,
        variables: Mapping[str, str],
    ) -> None:
        self._name = name
        self._variables = variables
        self.announced: Future[str] = Future()
        self.pid = 0
        self._serve = serve
        self._options = options
        self._on_end = on_end
        self._owner = os.getpid()
        self._is_stopping = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def run(self) -> None:
        """Start it, and wait for its end."""
        try:
            process, announced = self._start()
        except Exception as e:  # noqa: BLE001  it belongs to the waiter
            self.announced.set_exception(RuntimeError(str(e)))
            return
        self._process, self.pid = process, process.pid
        self.announced.set_result(announced)
        status = process.wait()
        if not self._is_stopping:
            self._on_end(status)

    def stop(self) -> None:
        process = self._process
        if process is None or os.getpid() != self._owner:  # a forked child of the owner has nothing to stop
            return
        self._is_stopping = True
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> "tuple[subprocess.Popen[bytes], str]":
        receiving, sending = os.pipe()
        options = {**self._options, "--announce-fd": str(sending), "--parent-pid": str(os.getpid())}
        # -P: the training repository may have a `manager` or a `lighthouse` of its own in its working directory.
        command = [sys.executable, "-P", "-c", self._serve, "serve"]
        try:
            process = subprocess.Popen(
                command + [text for pair in options.items() for text in pair],
                pass_fds=(sending,),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # torchrun signals its rank's process group, and the rank drains by this daemon
                env={**os.environ, **self._variables},
            )
        except OSError:
            os.close(receiving)
            raise
        finally:
            os.close(sending)
        return process, _announced(process, receiving, self._name)


def _announced(process: "subprocess.Popen[bytes]", receiving: int, name: str) -> str:
    with open(receiving, closefd=True) as pipe:
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(pipe, select.POLLIN)
        line = pipe.readline().strip() if poll.poll(START_TIMEOUT_S * 1000) else ""
    if line:
        return line
    process.kill()
    raise RuntimeError(f"{name} did not start (status {process.wait()}); see its messages above")
