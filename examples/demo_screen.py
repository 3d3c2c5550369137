"""Display of the demo: a live table with a row per group on a terminal, and plain lines elsewhere."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

PLAIN_EVERY_S = 3.0
_STYLES = {"training": "green", "killed": "red", "starting": "yellow", "finished": "cyan"}


@dataclass(slots=True)
class Row:
    group: str
    state: str = "starting"
    step: int = 0
    loss: float = float("nan")
    quorum_id: int = 0
    participants: int = 0
    last_event: str = ""


class Screen(Protocol):
    def show(self, rows: list[Row]) -> None: ...
    def say(self, text: str) -> None: ...


class LiveScreen:
    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def show(self, rows: list[Row]) -> None:
        table = Table(expand=False)
        for title in ("group", "state", "step", "loss", "quorum", "last event"):
            table.add_column(title, justify="right" if title in ("step", "loss", "quorum") else "left")
        for row in rows:
            quorum = f"…{row.quorum_id % 100_000:05d} ({row.participants})" if row.quorum_id else "-"
            state = f"[{_STYLES[row.state]}]{row.state}[/]"
            table.add_row(row.group, state, f"{row.step}/{self._steps}", f"{row.loss:.3f}", quorum, row.last_event)
        self._live.update(table, refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text)


class PlainScreen:
    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        return None

    def show(self, rows: list[Row]) -> None:
        if time.monotonic() - self._shown_at < PLAIN_EVERY_S:
            return
        self._shown_at = time.monotonic()
        parts = [f"{row.group} {row.state} step {row.step}/{self._steps} loss {row.loss:.3f}" for row in rows]
        self.say("; ".join(parts))

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def make_screen(console: Console, steps: int) -> LiveScreen | PlainScreen:
    return LiveScreen(console, steps) if console.is_terminal else PlainScreen(console, steps)
