"""The guard process between a supervisor and its ranks.

It starts the ranks, reads their output, and makes sure that no descendant of a rank survives it. It is a separate
process because gRPC does not survive a fork, and because it must outlive a supervisor that is killed. It receives
orders and sends results as lines of JSON on a socket:

    {"start": 1, "argv": [...], "env": {...}, "label": "a/0", "log": "...", "is_shown": true, "has_input": false}
    {"halt": 1, "grace_s": 10}
    {"signal": 1, "pass": 10}             for the processes of number 1 that handle signal 10
    {"signal_tree": 1, "with": 9, "is_largest": false}   for the whole tree, or for its process with the most memory
    {"tail": 1}
    -> {"tail": 1, "output": [...]}                                                last lines
    -> {"ended": 1, "status": -9, "output": [...], "error": "...", "why": "..."}   end of the whole tree

When the socket closes, the guard kills all its descendants and exits. A process that was stopped by a signal (SIGSTOP)
still occupies its slot and its GPU, so the guard kills it after STOPPED_S and reports this in `why`. Each process is
the leader of its own session, and the kernel kills it if the guard dies. The guard imports only the standard library
and a few of our modules that import nothing else either.
"""

import contextlib
import fcntl
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from manager.guard import process_tree
from manager.guard.child import PASSING_ERRORS, UNKILLABLE_S, Child, OutputQueue

_POLL_S = 0.02
_STRAYS_S = 5.0  # descendants that survive SIGKILL for this long after the end of their rank are abandoned
_READ_BYTES = 1 << 16
_LAST_READS = 16  # as much as the largest pipe holds (/proc/sys/fs/pipe-max-size)
_REST_S = 1.0  # time limit for writing the remaining output before the exit
STOPPED_S = 12.0  # how long a process may be stopped; a manager gives up a lost rank after about the same time


class Guard:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._folder = Path(tempfile.mkdtemp(prefix="lighthouse-run-"))
        _lock_folder(self._folder)
        self._children: dict[int, Child] = {}
        self._strays_until: float | None = None  # when to stop searching for strays; None if no search is running
        self._output = OutputQueue()
        self._selector = selectors.PollSelector()
        self._pending = b""
        self._is_open = True
        self._is_muted = False
        self._is_writing = False

    def run(self) -> None:
        """Serve orders until the control socket closes, then kill all descendants of the guard."""
        woken, wake = os.pipe()
        for descriptor in (woken, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._control, selectors.EVENT_READ, self._read_orders)
        self._selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 4096))
        try:
            while self._is_open:
                for key, _ in self._selector.select(self._select_timeout_s()):
                    key.data()
                self._reap()
                self._finish_children()
                self._apply_backpressure()
        finally:
            self._end_all()
            self._write_rest()

    def _select_timeout_s(self) -> float | None:
        if self._strays_until is not None or any(child.status is not None for child in self._children.values()):
            return _POLL_S
        now = time.monotonic()
        kills = [child.kill_at for child in self._children.values() if child.kill_at is not None]
        stops = [child.stopped_at for child in self._children.values() if child.stopped_at is not None]
        waits = [*(min(_POLL_S, at - now) if at > now else _POLL_S for at in kills)]
        waits += [max(0.0, at + STOPPED_S - now) for at in stops]
        return min(waits, default=None)

    # -- orders

    def _read_orders(self) -> None:
        try:
            data = self._control.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._is_open = False
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            order: dict[str, Any] = json.loads(line)
            if "start" in order:
                self._start(order)
            elif "pass" in order:
                self._forward_signal(order["signal"], order["pass"])
            elif "signal_tree" in order:
                if (child := self._children.get(order["signal_tree"])) is not None:
                    self._signal_tree(child, order["with"], is_largest=order["is_largest"])
            elif "tail" in order:
                child = self._children.get(order["tail"])
                self._send({"tail": order["tail"], "output": child.lines.current_tail if child is not None else []})
            else:
                if (child := self._children.get(order["halt"])) is not None:
                    self._halt(child, order["grace_s"])

    def _start(self, order: dict[str, Any]) -> None:
        number, label = order["start"], order["label"]
        failure = "cannot open its log file (--log-dir)"
        try:
            error_file = self._folder / f"{number}.json"
            child = Child(number, label, order["is_shown"], order["log"], error_file, is_users=not order["has_input"])
            if text := child.open_log():
                self._print(label, text)
            failure = f"cannot run {order['argv'][0]}"
            child.spawn(order["argv"], order["env"], has_input=order["has_input"])
        except (OSError, subprocess.SubprocessError) as e:
            text = _sendable(f"{failure}: {e}")
            self._print(label, text)
            self._send({"ended": number, "status": 127, "output": [text], "error": "", "why": ""})
            return
        self._children[number] = child
        self._resume(child)

    def _forward_signal(self, number: int, signal_number: int) -> None:
        if (child := self._children.get(number)) is not None and child.status is None:
            reached = process_tree.forward_signal(child.pid, signal_number)
            name = signal.Signals(signal_number).name
            refusal = f"{name} not forwarded: no process handles it, so it would kill the rank"
            self._print(child.label, f"{name} forwarded" if reached else refusal)

    def _signal_tree(self, child: Child, signal_number: int, *, is_largest: bool) -> None:
        """Send a signal for `lighthouse chaos`. Processes that the child starts during the call may not receive it."""
        pids = process_tree.marked_descendants(os.getpid(), child.mark, child.pid)
        process_tree.send([process_tree.largest(pids)] if is_largest and pids else pids, signal_number)
        self._print(child.label, f"lighthouse chaos: {signal.Signals(signal_number).name}")

    def _halt(self, child: Child, grace_s: float) -> None:
        if child.status is None and child.kill_at is None and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        at = time.monotonic() + grace_s
        child.kill_at = at if child.kill_at is None else min(child.kill_at, at)

    # -- exits of processes

    def _reap(self) -> None:
        by_pid = {child.pid: child for child in self._children.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = by_pid.get(pid)
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                if child is not None:
                    child.stopped_at = time.monotonic() if os.WIFSTOPPED(status) else None
            elif child is not None:
                child.record_exit(os.waitstatus_to_exitcode(status))

    def _finish_children(self) -> None:
        now = time.monotonic()
        for child in list(self._children.values()):
            if child.status is not None and child.kill_at is None:
                child.kill_at = now  # kill its descendants, too
            if child.stopped_at is not None and now >= child.stopped_at + STOPPED_S:
                child.stopped_at = None
                if child.kill_at is None:
                    child.kill_at, child.why = now, f"it was stopped by a signal for {STOPPED_S:g} s, and killed"
            left = [child.pid]
            if child.status is not None or _is_due(child, now):
                left = process_tree.marked_descendants(os.getpid(), child.mark, child.pid)
            if _is_due(child, now):
                process_tree.kill(left)
            if child.status is None and child.kill_at is not None and now >= child.kill_at + UNKILLABLE_S:
                child.record_exit(-signal.SIGKILL)  # the kernel ends it later, or never
            if child.status is not None and (not left or now >= (child.kill_at or now) + _STRAYS_S):
                self._report_end(child, child.status, left)
        self._end_strays()

    def _end_strays(self) -> None:
        """Kill strays (see process_tree.py) that are older than every running rank, so no running rank started them."""
        if self._strays_until is None:
            return
        here = self._children.values()
        found = process_tree.strays(os.getpid(), [each.pid for each in here], [each.mark for each in here])
        born_at = [process_tree.born_at(each.pid) for each in here if each.is_users]
        due = [stray for stray in found if all(at > stray.born_at for at in born_at)]
        for stray in due:
            process_tree.kill(stray.tree)
        if not due or time.monotonic() >= self._strays_until:
            self._strays_until = None

    def _report_end(self, child: Child, status: int, left: list[int]) -> None:
        del self._children[child.number]
        self._strays_until = time.monotonic() + _STRAYS_S
        for _ in range(_LAST_READS):  # a daemon that has dropped its mark may write forever
            if not self._read_output(child):
                break
        self._pause(child)
        self._show(child, child.lines.end())
        child.close()
        output = child.lines.kept
        if left:
            text = f"processes {left} cannot be killed: a driver or file system blocks them, or another user owns them"
            self._print(child.label, text)
            output = [*output, f"({text})"]
        self._send(
            {"ended": child.number, "status": status, "output": output, "error": child.error(), "why": child.why}
        )

    def _end_all(self) -> None:
        """Kill all descendants of the guard, including processes that start during the call."""
        ends_at = time.monotonic() + _STRAYS_S
        while (left := process_tree.descendants(os.getpid())) and time.monotonic() < ends_at:
            process_tree.kill(left)
            time.sleep(0.005)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- output

    def _read_output(self, child: Child) -> bool:
        """Read, log and print the available output of a child. Return whether there may be more."""
        try:
            data = os.read(child.output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._pause(child)
            child.is_read = True
            return False
        if text := child.write_log(data):
            self._print(child.label, text)
        self._show(child, child.lines.feed(data))
        return True

    def _show(self, child: Child, lines: list[bytes]) -> None:
        if child.is_shown and not self._is_muted:
            self._output.put(f"[{child.label}] ", lines)

    def _pause(self, child: Child) -> None:
        if not child.is_paused:
            child.is_paused = True
            self._selector.unregister(child.output)

    def _resume(self, child: Child) -> None:
        child.is_paused = False
        self._selector.register(child.output, selectors.EVENT_READ, lambda: self._read_output(child))

    def _apply_backpressure(self) -> None:
        """Stop reading the ranks' output while the guard's own output is blocked. The ranks' writes then block, too."""
        if self._output.has_data != self._is_writing:
            self._is_writing = self._output.has_data
            if self._is_writing:
                self._selector.register(sys.stdout.fileno(), selectors.EVENT_WRITE, self._write)
            else:
                self._selector.unregister(sys.stdout.fileno())
        for child in self._children.values():
            if self._output.is_full and child.is_shown:
                self._pause(child)
            elif child.is_paused and not child.is_read:
                self._resume(child)

    def _write(self) -> None:
        piece = self._output.next_chunk()
        try:
            self._output.consume(os.write(sys.stdout.fileno(), piece))
        except BlockingIOError:
            return
        except OSError as e:
            self._is_muted = e.errno not in PASSING_ERRORS  # any other error means that the reader has closed the pipe
            while piece := self._output.next_chunk():
                self._output.consume(len(piece))

    def _write_rest(self) -> None:
        """Write the remaining output of the ranks. Give up after _REST_S, because the reader may have stopped."""
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        ends_at = time.monotonic() + _REST_S
        while self._output.has_data and poll.poll(1000 * max(0.0, ends_at - time.monotonic())):
            self._write()

    def _print(self, label: str, text: str) -> None:
        self._output.put(f"[{label}] ", [_sendable(text).encode()])

    def _send(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):
            self._control.sendall(json.dumps(event).encode() + b"\n")


def _sendable(text: str) -> str:
    """Escape lone surrogates, which stand for the bytes of a path that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _lock_folder(folder: Path) -> None:
    """Lock a folder until this process exits, so that systemd-tmpfiles does not remove it when it is 10 days old."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def _is_due(child: Child, now: float) -> bool:
    return child.kill_at is not None and now >= child.kill_at


def main() -> None:
    """Run the guard. sys.argv contains the descriptor of the control socket and the supervisor's pid."""
    control = socket.socket(fileno=int(sys.argv[1]))
    decided = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    for number in (*decided, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides
    process_tree.become_subreaper()
    if os.getppid() == int(sys.argv[2]):
        try:
            guard = Guard(control)
        except OSError as e:
            sys.exit(f"Error: TMPDIR: the guard of the ranks cannot create a temporary folder: {e}")
        guard.run()
