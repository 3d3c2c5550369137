"""Formatting of statuses, runs and evidence as tables and lines of text.

This module defines the columns of all tables. The functions return lines for a given width; the caller prints them.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from lighthouse.cli.layout import Column, table
from lighthouse.job.records import Verdict
from lighthouse_protocol.messages.incident import Gathered, MemberEvidence
from lighthouse_protocol.messages.run import RankState, RankStatus, RunStatus, SupervisorStatus
from lighthouse_protocol.messages.status import JobStatus, LighthouseStatus, MemberState, MemberStatus
from lighthouse_runtime.cli import format_duration, printable

T = TypeVar("T")
Row = tuple[str, MemberStatus]

LATE_BEAT_S = 2.0
HEALS_SHOWN = 4
# States in order of urgency, for listings that cannot show all members.
_STATES = [
    MemberState.EXPIRED,
    MemberState.DOWN,
    MemberState.TIMED_OUT,
    MemberState.STARTING,
    MemberState.STRAGGLER,
    MemberState.HEALING,
    MemberState.IDLE,
]
_STATE_STYLES = {
    MemberState.PARTICIPANT: "green",
    MemberState.HEALING: "cyan",
    MemberState.JOINED: "cyan",
    MemberState.STRAGGLER: "yellow",
    MemberState.TIMED_OUT: "yellow",
    MemberState.STARTING: "cyan",
    MemberState.DOWN: "red",
    MemberState.EXPIRED: "red",
}
_RUN_RANK_STYLES: Mapping[str, str] = {
    RankState.LOST: "red",
    RankState.STARTING: "cyan",
    RankState.READY: "cyan",
    RankState.ACTIVE: "green",
}
_RUN_URGENCY: Mapping[str, int] = {state: place for place, state in enumerate(_RUN_RANK_STYLES)}
_VERDICT_STYLES: Mapping[str, str] = {
    Verdict.FORMED: "green",
    Verdict.READY: "green",
    Verdict.WAITING_FOR_MEMBERS: "cyan",
    Verdict.WAITING_FOR_STRAGGLERS: "yellow",
    Verdict.WAITING_FOR_RECALL: "cyan",
    Verdict.WAITING_FOR_RECONNECT: "yellow",
    Verdict.WAITING_FOR_LEASES: "yellow",
    Verdict.WAITING_FOR_LOST_MEMBER: "yellow",
    Verdict.TOO_FEW_PARTICIPANTS: "red",
    Verdict.NO_ALLOWED_SIZE: "red",
}
# Keyed by the text of QuorumPhase, whose module takes too long to import.
_PHASE_STYLES: Mapping[str, str] = {
    "standing": "green",
    "recalled": "cyan",
    "resumed": "cyan",
    "returning": "yellow",
    "revoked": "yellow",
}


def greeting(status: LighthouseStatus, address: str) -> str:
    return printable(f"lighthouse {status.version} at {address}, up {format_duration(status.uptime_s)}")


def status_lines(status: LighthouseStatus, width: int) -> list[Text]:
    """Return the output of `lighthouse status`: a progress line per job, a table of quorums and a table of runs."""
    stalled = {job.job for job in status.jobs if job.stall}
    runs = [replace(run, verdict="stalled") if run.job in stalled else run for run in status.runs if run.ranks]
    with_quorum = [job for job in status.jobs if has_quorum(job, runs)]
    are_many = len(status.jobs) > 1
    lines = [line for job in status.jobs if job.stall or job in with_quorum for line in _headline(job, are_many, width)]
    with_ranks = {job.job for job in status.jobs if job.members}
    for run in status.runs:
        if run.supervisors and not run.ranks and run.job not in with_ranks:
            text = printable(f"{run.job}: starting: {supervised(run)}; no rank has joined yet")
            lines += wrapped(Text(text, style="cyan"), width)
    if rows := [job for job in with_quorum if _verdict(job) != "ended"]:
        lines += table(_JOB_COLUMNS, rows, width)
    if runs:
        lines += [*([Text("")] if rows else []), *table(_RUN_COLUMNS, runs, width)]
    return lines or [Text("no jobs: no replica group or run is connected")]


def _headline(job: JobStatus, has_name: bool, width: int) -> list[Text]:
    name = f"{printable(job.job)}: " if has_name else ""
    data = () if job.data is None else (Text(f"  data: {job.data}", style="dim" if job.data.is_exact else "yellow"),)
    texts = (
        Text.assemble(name, progress(job)),
        *data,
        *(Text.assemble("  ", line) for line in (*heals(job), *preemptions(job))),
    )
    return [line for text in texts for line in wrapped(text, width)]


def progress(job: JobStatus) -> Text:
    """Describe the job's progress or, if there is none, the reason."""
    if job.stall:
        return stall(job)
    is_training = job.verdict == Verdict.FORMED and participants(job) > 0
    step = f"training: step {max_step(job)}, " if is_training else ""
    return Text(f"{step}{printable(job.explanation)}", style=_verdict_style(job))


def has_quorum(job: JobStatus, runs: Sequence[RunStatus]) -> bool:
    """Return whether to show the job itself: it has replica groups, or none of `runs` belongs to it."""
    return bool(job.members) or all(run.job != job.job for run in runs)


def _supervisor_state(supervisor: SupervisorStatus) -> str:
    if not supervisor.is_connected:
        return "gone"
    return "running" if supervisor.last.running else "starting"


def run_summary(run: RunStatus) -> list[Text]:
    """Return two lines about a run: its generation, and whether and why the next one forms."""
    name, generation = f"{run.job}/{run.run}", _generation(run)
    counts = Counter(rank.state for rank in run.ranks)
    states = ", ".join(f"{counts[state]} {state.value}" for state in RankState if counts[state])
    return [
        Text.assemble(
            (printable(name), "bold"),
            f"  generation {generation}, {counted(run.counters.job_restarts, 'restart')}, step {_run_step(run)}",
        ),
        Text.assemble((printable(run.verdict), _run_style(run)), f": {states}"),
    ]


def supervised(run: RunStatus) -> str:
    """Summarise the supervisors of a run, their running ranks and their restarts."""
    running = sum(s.last.running for s in run.supervisors if s.is_connected)
    every = sum(len(s.slots) for s in run.supervisors)
    return (
        f"{counted(len(run.supervisors), 'supervisor')}, {running} of {counted(every, 'rank')} running, "
        f"{counted(sum(s.last.restarts for s in run.supervisors), 'restart')}"
    )


def run_rank_lines(ranks: Sequence[RankStatus], count: int, width: int) -> list[Text]:
    """Return a table of `ranks` or, if there are more than `count`, of the `count` most urgent ranks."""
    if len(ranks) > count:
        ranks = sorted(ranks, key=lambda rank: _RUN_URGENCY.get(rank.state, 9))[:count]
    return table(_RUN_RANK_COLUMNS, ranks, width)


def member_lines(rows: Sequence[Row], width: int) -> list[Text]:
    """Return a table with a row per replica group. It has a job column if there are several jobs."""
    has_notice = any(row[1].preemption for row in rows)
    return table([*_MEMBER_COLUMNS, *([_ENDS_IN] if has_notice else [])], rows, width)


def member_rows(status: LighthouseStatus) -> list[Row]:
    return [(j.job, m) for j in status.jobs for m in sorted(j.members, key=lambda m: natural_key(m.replica_id))]


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders group_2 before group_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def job_summary(job: JobStatus) -> list[Text]:
    """Return lines about a job: its quorum, its progress, the states of its groups, and its heals."""
    quorum = f"quorum {job.quorum_id}, {format_duration(job.quorum_age_s)} old" if job.quorum_id else "no quorum yet"
    return [
        Text.assemble(
            (printable(job.job), "bold"),
            f"  {quorum}",
            *((", ", (printable(job.phase), _phase_style(job))) if job.phase not in ("", "none") else ()),
            f", step {max_step(job)}",
        ),
        progress(job),
        Text(state_counts(job)),
        *heals(job),
        *preemptions(job),
    ]


def stall(job: JobStatus) -> Text:
    """Describe in one line how long a job has stalled, and which ranks are behind."""
    return Text(f"nothing has moved for {format_duration(job.stall_s)}: {printable(job.stall)}", style="red")


def heals(job: JobStatus) -> list[Text]:
    """Return a line per healing group, longest heal first, for at most HEALS_SHOWN groups."""
    healing = sorted((m for m in job.members if m.heal is not None), key=lambda m: -(m.heal.seconds if m.heal else 0))
    lines = [Text(printable(f"{m.replica_id} is {m.heal.text}"), style="cyan") for m in healing[:HEALS_SHOWN] if m.heal]
    more = len(healing) - HEALS_SHOWN
    return [*lines, Text(f"{counted(more, 'more group')} healing", style="cyan")] if more > 0 else lines


def preemptions(job: JobStatus) -> list[Text]:
    """Return a line per group whose hosts will be taken away, the soonest first, for at most HEALS_SHOWN groups."""
    ending = [(m, m.preemption) for m in job.members if m.preemption is not None]
    ending.sort(key=lambda pair: math.inf if pair[1].left_s is None else pair[1].left_s)
    lines = [f"{m.replica_id} {preemption}" for m, preemption in ending[:HEALS_SHOWN]]
    if (more := len(ending) - HEALS_SHOWN) > 0:
        lines.append(f"{counted(more, 'more group')} with a preemption notice")
    return [Text(printable(line), style="yellow") for line in lines]


def _ends_in(row: Row) -> str:
    preemption = row[1].preemption
    if preemption is None:
        return "-"
    if preemption.is_advice or preemption.left_s is None:
        return "perhaps" if preemption.is_advice else "soon"
    return format_duration(preemption.left_s)


def most_urgent(members: Sequence[MemberStatus], count: int) -> list[MemberStatus]:
    """Return all members sorted by name or, if there are more than `count`, the `count` most urgent members."""
    return sorted(members, key=(lambda m: natural_key(m.replica_id)) if len(members) <= count else _urgency)[:count]


def participants(job: JobStatus) -> int:
    return sum(member.is_participant and member.state is not MemberState.EXPIRED for member in job.members)


def max_step(job: JobStatus) -> int:
    return max((member.step for member in job.members if member.is_participant), default=0)


def state_counts(job: JobStatus) -> str:
    counts = Counter(member.state for member in job.members)
    parts = ", ".join(f"{counts[state]} {state.value}" for state in MemberState if counts[state])
    return counted(len(job.members), "member") + (f": {parts}" if parts else "")


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def wrapped(text: Text, width: int) -> list[Text]:
    return [*text.wrap(Console(width=max(20, width)), max(18, width))]


def _generation(run: RunStatus) -> str:
    return str(run.counters.number) if run.counters.number >= 0 else "-"


def _run_step(run: RunStatus) -> int:
    return max((rank.step for rank in run.ranks if rank.state == RankState.ACTIVE), default=0)


def _run_style(run: RunStatus) -> str:
    return "red" if run.stop is not None else "green" if run.verdict in ("stands", "completed") else "yellow"


def _urgency(member: MemberStatus) -> Any:
    place = _STATES.index(member.state) if member.state in _STATES else len(_STATES)
    return place, member.commit_failures == 0, natural_key(member.replica_id)


def _verdict(job: JobStatus) -> str:
    """Return the verdict to show for a job, which may differ from the lighthouse's own verdict.

    The lighthouse's own verdict does not cover stalls, ended jobs, or quorums whose members are all lost.
    """
    if job.verdict != Verdict.FORMED:
        return job.verdict if job.ended_step is None else "ended"
    if job.stall:
        return "stalled"
    is_lost = job.members and all(member.state is MemberState.EXPIRED for member in job.members)
    return "all_lost" if is_lost else job.verdict


def _verdict_style(job: JobStatus) -> str:
    verdict = _verdict(job)
    if verdict == "ended":
        return ""
    if verdict == Verdict.NO_JOINS and any(member.state is not MemberState.EXPIRED for member in job.members):
        return "cyan"  # groups are starting
    return _VERDICT_STYLES.get(verdict, "red")


def _phase_style(job: JobStatus) -> str:
    return _PHASE_STYLES.get(job.phase, "")


def _beat_column(age_s: Callable[[T], float], keep: int) -> Column[T]:
    """Return a column for the age of the last heartbeat, which `age_s` returns for a row. See `Column` for `keep`."""
    return Column(
        "BEAT",
        lambda row: format_duration(age_s(row)),
        lambda row: "yellow" if age_s(row) > LATE_BEAT_S else "",
        is_number=True,
        keep=keep,
    )


_JOB_COLUMNS: Sequence[Column[JobStatus]] = (
    Column("JOB", lambda job: job.job, comfort=12),
    Column("VERDICT", _verdict, _verdict_style),
    Column("STEP", lambda job: str(max_step(job)), is_number=True, keep=2),
    Column("GROUPS", lambda job: f"{participants(job)}/{len(job.members)}", is_number=True, keep=4),
    Column("QUORUM", lambda job: str(job.quorum_id or "-"), is_number=True),
    Column("AGE", lambda job: format_duration(job.quorum_age_s) if job.quorum_id else "-", is_number=True, keep=3),
    Column(
        "PHASE",
        lambda job: job.phase if participants(job) else "-",
        _phase_style,
        keep=1,
    ),
)

_RUN_COLUMNS: Sequence[Column[RunStatus]] = (
    Column("JOB", lambda run: run.job, keep=5, comfort=12, tells_apart=True),
    Column("RUN", lambda run: run.run, comfort=12),
    Column("GENERATION", _generation, is_number=True),
    Column("ACTIVE", lambda run: str(len(run.slots)), is_number=True, keep=4),
    Column("SPARES", lambda run: str(sum(r.state == RankState.SPARE for r in run.ranks)), is_number=True, keep=3),
    Column("RESTARTS", lambda run: str(run.counters.job_restarts), is_number=True, keep=2),
    Column("STEP", lambda run: str(_run_step(run)), is_number=True, keep=1),
    Column("VERDICT", lambda run: run.verdict, _run_style),
)

SUPERVISOR_COLUMNS: Sequence[Column[SupervisorStatus]] = (
    Column("GROUP", lambda s: s.name, comfort=20),
    Column("STATE", _supervisor_state, lambda s: "green" if s.last.running and s.is_connected else "red"),
    Column("RANKS", lambda s: f"{s.last.running}/{len(s.slots)}" if s.is_connected else "-", is_number=True, keep=2),
    Column("RESTARTS", lambda s: str(s.last.restarts), is_number=True),
    Column("LEFT", lambda s: str(s.last.restarts_left), is_number=True, keep=3),
    Column("HOST", lambda s: s.host or "-", keep=1, comfort=12),
)

_RUN_RANK_COLUMNS: Sequence[Column[RankStatus]] = (
    Column("SLOT", lambda rank: str(rank.slot), is_number=True),
    Column("STATE", lambda rank: rank.state, lambda rank: _RUN_RANK_STYLES.get(rank.state, "")),
    Column("RANK", lambda rank: "-" if rank.rank is None else str(rank.rank), is_number=True, keep=4),
    Column("GEN", lambda rank: "-" if rank.generation is None else str(rank.generation), is_number=True, keep=5),
    Column("STEP", lambda rank: str(rank.step), is_number=True, keep=6),
    _beat_column(lambda rank: rank.beat_age_s, keep=3),
    Column("HOST", lambda rank: rank.host or "-", keep=1, comfort=12),
    Column("PID", lambda rank: str(rank.pid or "-"), is_number=True, keep=0),
)

_MEMBER_COLUMNS: Sequence[Column[Row]] = (
    Column("JOB", lambda row: row[0], keep=6, comfort=12, tells_apart=True),
    Column("REPLICA", lambda row: row[1].replica_id, comfort=20),
    Column("STATE", lambda row: row[1].state.value, lambda row: _STATE_STYLES.get(row[1].state, "")),
    Column("IN", lambda row: "yes" if row[1].is_participant else "no", keep=3),
    Column("STEP", lambda row: str(row[1].step), is_number=True, keep=7),
    Column("RANKS", lambda row: str(row[1].world_size or "-"), is_number=True, keep=2),
    _beat_column(lambda row: row[1].heartbeat_age_s, keep=5),
    Column(
        "FAILED",
        lambda row: str(row[1].commit_failures),
        lambda row: "red" if row[1].commit_failures else "",
        is_number=True,
        keep=4,
    ),
    Column("ADDRESS", lambda row: row[1].address.removeprefix("http://") or "-", keep=1, comfort=18),
    Column("START", lambda row: row[1].start or "-", keep=0),
)
_ENDS_IN: Column[Row] = Column("ENDS IN", _ends_in, lambda _: "yellow", is_number=True, keep=6)


ENTRIES_SHOWN = 5


def gathered_lines(gathered: Gathered, suspects: Collection[str] = ()) -> Iterator[Text]:
    """Yield a section of lines for each rank, and a line for each reason why evidence is missing. Mark `suspects`."""
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
    """Return the lines of a stack dump by faulthandler, with the main thread moved from the end to the start."""
    return "\n\n".join(reversed(stacks.strip().split("\n\n"))).splitlines()


def _entries(recorded: str) -> list[str]:
    """Return a line for each of the newest Flight Recorder entries, or `recorded` unchanged if it is no JSON list."""
    try:
        entries = json.loads(recorded) if recorded else []
        return [_entry(entry) for entry in entries[-ENTRIES_SHOWN:]] if isinstance(entries, list) else [recorded]
    except (ValueError, TypeError, RecursionError):
        return [recorded]


def _entry(entry: Any) -> str:
    """Format an entry of PyTorch's Flight Recorder, for example "24 all_reduce 4096x1024, 63.1 s ago: scheduled".

    Gloo leaves the state at "scheduled". An entry that is `retired` has finished.
    """
    if not isinstance(entry, dict):
        return str(entry)
    sizes = " ".join("x".join(map(str, size)) or "scalar" for size in entry.get("input_sizes") or () if size)
    what = " ".join(filter(None, (str(entry.get("seq", "")), str(entry.get("operation", "")), sizes)))
    age_s = entry.get("age_s")
    since = f", {age_s:.1f} s ago" if isinstance(age_s, int | float) else ""
    state = "over" if entry.get("retired") else entry.get("state") or "no state"
    return f"{what}{since}: {state} (group {entry.get('group', '?')})"
