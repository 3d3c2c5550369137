"""Writes a trace of a rank: one file per process, with a line for each phase, wait or collective that begins or ends.

The trace also contains decisions on steps and digests of states.

    2026-11-22T07:41:03.118201Z step 812 enters validation
    2026-11-22T07:41:03.120044Z step 812 enters all_reduce 24 of quorum 17, 4096x1024
    2026-11-22T07:41:03.131377Z step 812 leaves all_reduce 24 of quorum 17, 4096x1024 after 0.011 s
    2026-11-22T07:41:03.140210Z step 812 commits under quorum 17

LOG_VARIABLE names the folder of the files; if it is not set, nothing is written. A rank hangs at the last line with
"enters" that has no matching "leaves". A `diff` of two ranks' files shows where they diverge.
"""

import logging
import os
import time
import urllib.parse
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from agent_client.errors import ConfigurationError
from agent_client.progress.activity import Shape, TorchCollective, shown
from agent_client.progress.progress import Block, Progress
from agent_client.progress.rules import Number

log = logging.getLogger(__name__)

LOG_VARIABLE = "LIGHTHOUSE_TRACE_DIR"


def make_progress(group_rank: int, variables: Mapping[str, str] = os.environ) -> Progress:
    """Create the Progress of a rank, with a trace file if LOG_VARIABLE names a folder.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    folder = variables.get(LOG_VARIABLE)
    if not folder:
        return Progress()
    group = urllib.parse.quote(variables.get("REPLICA_GROUP_ID") or "group", safe="@+=")
    path = Path(folder) / f"{group}-rank-{group_rank}-{os.getpid()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return TracedProgress(Lines(path))
    except OSError as e:
        raise ConfigurationError(f"{LOG_VARIABLE}={folder}: {path} cannot be written: {e.strerror}") from None


class Lines:
    """Appends lines to a file, unbuffered. Thread-safe.

    After the first write error, further lines are dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._has_failed = False

    def write(self, text: str) -> None:
        if self._has_failed:
            return
        line = f"{datetime.now(UTC).isoformat(timespec='microseconds').removesuffix('+00:00')}Z {text}\n"
        try:
            os.write(self._descriptor, line.encode())
        except OSError as e:
            # Keep the descriptor open, because another thread may be about to write, and the number could be reused.
            self._has_failed = True
            log.warning("%s: tracing stopped: %s", self._path, e.strerror)


class TracedProgress(Progress):
    def __init__(self, lines: Lines, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._lines = lines

    def decided(self, step: int, quorum_id: int, *, is_committed: bool) -> None:
        self._lines.write(f"step {step} {'commits' if is_committed else 'is discarded'} under quorum {quorum_id}")

    def has_state(self, step: int, quorum_id: int, digest: str) -> None:
        self._lines.write(f"step {step} has state {digest} under quorum {quorum_id}")

    def phase(self, name: str, total: int | None = None) -> Block:
        return self._logged(name if total is None else f"{name} of {total}", super().phase(name, total))

    def waiting_for(self, what: str) -> Block:
        return self._logged(f"the wait for {what}", super().waiting_for(what))

    def collective(
        self,
        quorum_id: int,
        number: int,
        operation: str,
        shape: Shape = "",
        *,
        within_group: bool = False,
        inner: int = 0,
    ) -> Block:
        inside = super().collective(quorum_id, number, operation, shape, within_group=within_group, inner=inner)
        return self._logged(_words(Number(quorum_id, number, inner), operation, shape, within_group), inside)

    def torchs(self, operation: str, shape: Shape) -> TorchCollective:
        """Trace the entry only, because torch does not report when such a collective completes."""
        entered = super().torchs(operation, shape)
        number = self.numbers.number_of(entered.entry, within_group=True)
        self._lines.write(f"step {self.number} enters torch's {_words(number, operation, shape, True)}")
        return entered

    def asking(self, what: str) -> Block:
        return self._logged(f"the wait for {what}", super().asking(what))

    def busy(self, what: str) -> Block:
        return self._logged(what, super().busy(what))

    def _logged(self, what: str, block: Block) -> "_Logged":
        return _Logged(self, self._lines, what, block)


def _words(number: Number, operation: str, shape: Shape, within_group: bool) -> str:
    quorum_id, count, inner = number
    nth = f"{count}.{inner}" if inner else str(count)
    return f"{operation} {nth} of quorum {quorum_id}{' in the group' if within_group else ''}, {shown(shape)}"


class _Logged:
    def __init__(self, progress: Progress, lines: Lines, what: str, block: Block) -> None:
        self._progress, self._lines, self._what, self._block = progress, lines, what, block
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = self._progress.clock()
        self._lines.write(f"step {self._progress.number} enters {self._what}")
        self._block.__enter__()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._block.__exit__(kind, e, at)
        how = f", by {kind.__name__}" if kind is not None else ""
        took_s = self._progress.clock() - self._since
        self._lines.write(f"step {self._progress.number} leaves {self._what} after {took_s:.3f} s{how}")
