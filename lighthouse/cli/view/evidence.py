"""What ranks were doing, as lines for a person."""

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from rich.text import Text

from lighthouse_protocol.messages.incident import Gathered, MemberEvidence
from lighthouse_runtime.cli.terminal import printable

ENTRIES_SHOWN = 5


def gathered_lines(gathered: Gathered, suspects: Collection[str] = ()) -> Iterator[Text]:
    """A part for each rank, `suspects` marked; below them the ranks that gave nothing."""
    for one in gathered.evidence:
        yield from _rank_lines(one, is_suspect=one.name in suspects)
        yield Text()
    for reason in gathered.missing:
        yield Text.assemble(("missing  ", "yellow"), printable(reason))


def _rank_lines(one: MemberEvidence, *, is_suspect: bool) -> Iterator[Text]:
    rank = one.rank
    where = f"pid {rank.pid}" if rank.pid else "no pid"
    at = f"{where} on {rank.host}" if rank.host else where
    yield Text.assemble(
        (printable(one.name), "bold red" if is_suspect else "bold"),
        f"  {'behind, ' if is_suspect else ''}{printable(at)}, after {rank.took_s:.1f} s",
    )
    yield from _part("stacks, the main thread first", _threads(rank.stacks))
    yield from _part("Flight Recorder, the newest last", _entries(rank.flight_recorder))
    yield from _part("process", rank.process.splitlines())
    yield from _part("last output", rank.output)
    yield from _part("missing", rank.missing, "yellow")


def _part(title: str, lines: Iterable[str], style: str = "") -> Iterator[Text]:
    for number, line in enumerate(lines):
        if number == 0:
            yield Text(f"  {title}", style="bold cyan")
        yield Text(f"    {printable(line.expandtabs())}", style=style)


def _threads(stacks: str) -> list[str]:
    """faulthandler has the main thread last."""
    return "\n\n".join(reversed(stacks.strip().split("\n\n"))).splitlines()


def _entries(recorded: str) -> list[str]:
    try:
        entries = json.loads(recorded) if recorded else []
    except ValueError:
        return [recorded]
    return [_entry(entry) for entry in entries[-ENTRIES_SHOWN:]] if isinstance(entries, list) else [recorded]


def _entry(entry: Any) -> str:
    """24 all_reduce 4096x1024, 63.1 s ago: scheduled (group 17). Gloo leaves the state at that; retired is over."""
    if not isinstance(entry, dict):
        return str(entry)
    sizes = " ".join("x".join(map(str, size)) or "scalar" for size in entry.get("input_sizes") or () if size)
    what = " ".join(filter(None, (str(entry.get("seq", "")), str(entry.get("operation", "")), sizes)))
    age_s = entry.get("age_s")
    since = f", {age_s:.1f} s ago" if isinstance(age_s, int | float) else ""
    state = "over" if entry.get("retired") else entry.get("state") or "no state"
    return f"{what}{since}: {state} (group {entry.get('group', '?')})"
