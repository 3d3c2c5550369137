"""What a rank was doing when somebody asked: its stacks, its newest collectives, its process, its output. No protobuf.

Nothing here is certain to be had, of a rank that hangs least of all: what could not be is named, with the reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from lighthouse_protocol.constraints import Age, Count, Cut, GroupRank, Output, Text
from lighthouse_protocol.limits import MAX_OUTPUT_CHARS, MAX_OUTPUT_LINES

# All of a rank takes at most 64 KiB, and of a replica group 8 MiB.
MAX_RANKS_IN_FULL = 128
MAX_STACKS_BYTES = 32 * 1024
MAX_FLIGHT_RECORDER_BYTES = 12 * 1024
MAX_PROCESS_BYTES = 7 * 1024
MAX_OUTPUT_BYTES = 8 * 1024
MAX_MISSING = 12
MAX_MISSING_BYTES = 240

STACKS_FILE = "lighthouse stacks"
"""The name of the file that a rank's stacks are written to."""

GATHERED_WITHIN_S = 8.0
"""All ranks of a group have given theirs, or are named with what is missing."""


def cut_missing(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(cut_middle(reason, MAX_MISSING_BYTES) for reason in tuple(reasons)[:MAX_MISSING])


def cut_middle(text: str, max_bytes: int) -> str:
    """Text is UTF-8 of at most `max_bytes`; the beginning and the end of what is longer."""
    body = text.encode(errors="replace")
    if len(body) <= max_bytes:
        return body.decode()
    gap = f"\n... {len(body) - max_bytes} bytes and more are left out ...\n"
    kept = max(0, max_bytes - len(gap))
    head, tail = body[: kept // 2], body[len(body) - (kept - kept // 2) :]
    return head.decode(errors="ignore") + gap + tail.decode(errors="ignore")


Stacks = Annotated[str, Cut(lambda text: cut_middle(text, MAX_STACKS_BYTES))]
ProcessText = Annotated[str, Cut(lambda text: cut_middle(text, MAX_PROCESS_BYTES))]
Missing = Annotated[tuple[str, ...], Cut(cut_missing)]


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """`stacks` are those of its Python threads; `flight_recorder` is JSON text, a list of collectives, the newest last;
    `process` what /proc says, in lines; `output` its last lines; `missing` what could not be had, and why."""

    group_rank: GroupRank
    rank_incarnation: Text = ""
    pid: Count = 0
    host: Text = ""
    stacks: str = ""
    flight_recorder: str = ""
    process: str = ""
    output: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    took_s: Age = 0.0

    def fitted(self) -> "RankEvidence":
        """On the wire, what is too long is cut: it is for a person to read."""
        return fitting(self)


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """What can be seen of a rank's process from outside, on its host. `is_stopped`: by a signal, so that it says
    nothing itself."""

    stacks: Stacks = ""
    process: ProcessText = ""
    output: Output = ()
    missing: Missing = ()
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class EvidenceAsked:
    """Say what you are doing: answered by a SelfReport of the same number, by a rank that can."""

    number: Count


@dataclass(frozen=True, slots=True)
class SelfReport:
    """What a rank gives of itself, the answer to the request of that number."""

    number: Count
    stacks: Stacks = ""
    flight_recorder: str = ""
    missing: Missing = ()


def fitting(evidence: RankEvidence, ranks: int = 1) -> RankEvidence:
    """The same, cut where it would be too long for a message, or for one of so many `ranks`. JSON that is cut is none:
    it is missing instead."""
    share = min(1.0, MAX_RANKS_IN_FULL / ranks)
    missing, recorder = evidence.missing, evidence.flight_recorder
    size, most = len(recorder.encode(errors="replace")), int(share * MAX_FLIGHT_RECORDER_BYTES)
    if size > most:
        missing, recorder = (*missing, f"Flight Recorder: {size} bytes; {most} are taken"), ""
    return replace(
        evidence,
        stacks=cut_middle(evidence.stacks, int(share * MAX_STACKS_BYTES)),
        flight_recorder=recorder,
        process=cut_middle(evidence.process, int(share * MAX_PROCESS_BYTES)),
        output=_last_lines(evidence.output, int(share * MAX_OUTPUT_BYTES)),
        missing=cut_missing(missing),
    )


def _last_lines(lines: tuple[str, ...], left: int) -> tuple[str, ...]:
    kept: list[str] = []
    for line in reversed(lines[-MAX_OUTPUT_LINES:]):
        shown = cut_middle(line, MAX_OUTPUT_CHARS)
        left -= len(shown.encode())
        if left < 0:
            break
        kept.append(shown)
    return tuple(reversed(kept))
