"""Exclusive use of a file by one process. The kernel releases the lock if its holder exits or is killed.

- The lock is an flock on `<file>.lock`, whose content names the holder. A forked child closes its copy of the lock.
- The holder removes the lock file when it releases the lock. So after locking, a process checks that the file it has
  opened is still at that path, because a former holder may have removed it between opening and locking.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path

from lighthouse_protocol.refusals import WrongState

# A holder writes its name after locking. Until then the file is empty or names a holder that was killed.
NAME_WAIT_S = 0.5
_POLL_S = 0.01


class FileLock:
    """Exclusive lock on the file `path`.

    `owner` describes this process in the error of any other process that tries to take the lock.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        self._path = path
        self._lock = path.with_name(path.name + ".lock")
        self._owner = owner
        self._fd: int | None = None

    @property
    def is_held(self) -> bool:
        return self._fd is not None

    def take(self) -> None:
        """Take the lock without waiting for its release.

        Raises:
            WrongState: If another process holds the lock. The message names the holder.
            OSError: If the lock file cannot be written.
        """
        name_by = time.monotonic() + NAME_WAIT_S
        while not self._try():
            holder = self._read()
            if _may_be_alive(holder) or time.monotonic() >= name_by:
                raise WrongState(
                    f"--journal: {self._path} is held by {_describe(holder)}. "
                    "A journal belongs to one lighthouse: stop that one, or name another file by --journal"
                )
            time.sleep(_POLL_S)

    def drop(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        _taken.discard(self)
        with contextlib.suppress(OSError):
            if _is_name_of(self._lock, fd):
                self._lock.unlink()
        os.close(fd)

    def _try(self) -> bool:
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_name_of(self._lock, fd):
                os.close(fd)
                return False
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            me = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "owner": self._owner}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(me).encode(), 0)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _taken.add(self)
        return True

    def _read(self) -> dict[str, object]:
        try:
            found = json.loads(self._lock.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def leave_to_parent(self) -> None:
        """Close the lock file's descriptor in a forked child.

        The parent keeps the lock. Unlocking here would release it for both processes, because they share it.
        """
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_name_of(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _may_be_alive(holder: dict[str, object]) -> bool:
    """Return whether the process that `holder`, the content of the lock file, describes may be alive.

    A process on another host cannot be checked and is assumed to be alive.
    """
    pid = holder.get("pid")
    if not isinstance(pid, int) or holder.get("host") != socket.gethostname():
        return "pid" in holder
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return True


def _describe(holder: dict[str, object]) -> str:
    if "pid" not in holder:
        return "a process that has not given its name"
    owner = f"the lighthouse at {holder['owner']}" if holder.get("owner") else "a lighthouse"
    return f"{owner} (pid {holder['pid']} on host {holder.get('host')}, since {holder.get('since')})"


_taken: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for claim in list(_taken):
        claim.leave_to_parent()
    _taken.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
