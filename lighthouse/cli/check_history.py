"""`lighthouse check-history`: check that the logs of a job are consistent with Lighthouse's guarantees.

The check reads text files only: the traces of the ranks (--trace-dir), and the logs of managers and lighthouses. It
shares no code with the parts that form quorums and commit steps, so it does not share their bugs.
"""

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote

import click

from lighthouse_runtime.cli import Duration, drop_stdout, reports_errors

TRACE = re.compile(r"(?P<group>.+)-rank-(?P<rank>\d{1,20})-(?P<pid>\d+)(?:-\d+)?\.log")
LINE = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+)Z step (?P<step>\d{1,20}) (?P<what>.+)")
COMMITS = re.compile(r"commits under quorum (\d{1,20})")
STATE = re.compile(r"has state (\S+) under quorum (\d{1,20})")
HEALS = re.compile(r"enters heal\b")
FORMED = re.compile(
    r"(?:\[(?P<job>[^\]]*)\] )?quorum (?P<id>\d{1,20}): (?P<names>\S+@\d+(?: \S+@\d+)*)(?P<more> and \d+ more)?"
)
STARTS = re.compile(r"manager \S+ of (?P<group>.+) \((?P<ranks>\d{1,20}) ranks?\) serves on .+")
RECEIVES = re.compile(r"received quorum (\d{1,20}) of \d+ groups: step \d+")
ANSWERS = re.compile(r"step (\d{1,20}) of quorum (\d{1,20}): rank (\d{1,20}) votes (yes|no), answer: (commit|discard)")
SHOWN = 20
MAX_LINE_CHARS = 64 * 1024


@dataclass(frozen=True, slots=True)
class Commit:
    step: int
    quorum_id: int
    at: float  # Unix time
    where: str  # file:line
    follows_heal: bool  # also True for the first commit of a process


@dataclass(frozen=True, slots=True)
class State:
    step: int
    quorum_id: int
    digest: str
    where: str


@dataclass(slots=True)
class Process:
    """A process of a rank, parsed from its trace file."""

    group: str
    rank: int
    ended_at: float = 0.0  # Unix time of its last line
    commits: list[Commit] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.group}"


@dataclass(frozen=True, slots=True)
class Formed:
    """A quorum that a lighthouse has formed, parsed from its log line."""

    job: str
    quorum_id: int
    groups: tuple[str, ...]
    is_cut: bool  # the line names the first groups only
    where: str


@dataclass(frozen=True, slots=True)
class LoggedVote:
    """A rank's vote on a step and the decision that its manager sent back, parsed from the manager's log."""

    step: int
    quorum_id: int
    rank: int
    is_yes: bool
    commits: bool
    where: str


@dataclass(slots=True)
class Manager:
    """A manager process, parsed from its log."""

    group: str
    ranks: int
    received: list[tuple[int, str]] = field(default_factory=list)  # quorum_id and file:line
    answers: list[LoggedVote] = field(default_factory=list)


@dataclass(slots=True)
class Rule:
    """A guarantee, with the number of checks and the violations that were found."""

    text: str
    checks: int = 0
    violations: list[str] = field(default_factory=list)

    def check(self, is_kept: bool, violation: str) -> None:
        self.checks += 1
        if not is_kept:
            self.violations.append(violation)


@dataclass(slots=True)
class History:
    processes: list[Process] = field(default_factory=list)
    formed: list[Formed] = field(default_factory=list)
    managers: list[Manager] = field(default_factory=list)


def read(folder: Path) -> History:
    """Parse all files below `folder`. Skip unrecognised lines, such as damaged ones.

    Raise OSError if a file or folder cannot be read, because a log that was not read could contain a violation.
    """
    history = History()
    for path in sorted(path for path in _paths(folder) if path.is_file()):
        with path.open(encoding="utf-8", errors="replace") as file:
            place = str(path.relative_to(folder))
            if named := TRACE.fullmatch(path.name):
                history.processes.append(_read_trace(unquote(named["group"]), int(named["rank"]), place, _lines(file)))
            else:
                _read_log(history, place, _lines(file))
    return history


def _paths(folder: Path) -> Iterator[Path]:
    def fail(e: OSError) -> None:
        raise e

    return (Path(parent, name) for parent, _, names in os.walk(folder, onerror=fail) for name in names)


def _lines(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line, except a last line truncated by a kill and lines that are too long.

    A file that is not a log, such as a checkpoint, may be one line of many gigabytes.
    """
    number, is_continued = 1, False
    while part := file.readline(MAX_LINE_CHARS):
        is_end = part.endswith("\n")
        if is_end and not is_continued:
            yield number, part[:-1]
        number, is_continued = number + is_end, not is_end


def _read_trace(group: str, rank: int, place: str, lines: Iterable[tuple[int, str]]) -> Process:
    process, has_healed = Process(group, rank), True
    for number, line in lines:
        if (found := LINE.fullmatch(line)) is None:
            continue
        try:
            at = datetime.fromisoformat(f"{found['time']}+00:00").timestamp()
        except ValueError:
            continue  # damaged
        step, what = int(found["step"]), found["what"]
        process.ended_at = max(process.ended_at, at)
        if HEALS.match(what):
            has_healed = True
        elif commits := COMMITS.fullmatch(what):
            process.commits.append(Commit(step, int(commits[1]), at, f"{place}:{number}", has_healed))
            has_healed = False
        elif state := STATE.fullmatch(what):
            process.states.append(State(step, int(state[2]), state[1], f"{place}:{number}"))
    return process


def _read_log(history: History, place: str, lines: Iterable[tuple[int, str]]) -> None:
    """Add the contents of a lighthouse's or manager's log to `history`. `place` is the path of the log.

    Lines of a manager that precede the message about its start are skipped.
    """
    managers: dict[str, Manager | None] = {}  # keyed by replica_id, which only lines in JSON have
    for where, text, job, group in _messages(place, lines):
        manager = managers.get(group)
        if found := FORMED.fullmatch(text):
            groups = tuple(sorted(name.rpartition("@")[0] for name in found["names"].split(" ")))
            is_cut = found["more"] is not None
            history.formed.append(Formed(job or found["job"] or "", int(found["id"]), groups, is_cut, where))
        elif found := STARTS.fullmatch(text):
            if group in managers and (manager is None or manager.group != found["group"]):
                managers[group] = None  # two managers write to this file, and lines in text do not name their manager
                continue
            managers[group] = manager = Manager(found["group"], int(found["ranks"]))
            history.managers.append(manager)
        elif manager is not None and (found := RECEIVES.fullmatch(text)):
            manager.received.append((int(found[1]), where))
        elif manager is not None and (found := ANSWERS.fullmatch(text)):
            step, quorum_id, rank = map(int, found.group(1, 2, 3))
            manager.answers.append(LoggedVote(step, quorum_id, rank, found[4] == "yes", found[5] == "commit", where))


def _messages(place: str, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield (file:line, message, job, replica_id) for each line. Job and replica_id are "" if the line has none."""
    for number, line in lines:
        text, job, group = line.partition(": ")[2], "", ""
        if line.startswith("{"):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue  # damaged
            text, job, group = (str(entry.get(key, "")) for key in ("message", "job", "replica_group"))
        yield f"{place}:{number}", text, job, group


def check(history: History, skew_s: float) -> list[Rule]:
    """Check `history` against all rules. `skew_s` is the maximum clock difference between two hosts in seconds."""
    return [
        _each_process_goes_forward(history.processes),
        _ranks_of_a_group_agree(history.processes, skew_s),
        _no_commit_is_taken_back(history.processes, skew_s),
        _states_are_equal(history.processes),
        _an_id_names_one_list(history.formed),
        _only_participants_commit(history),
        _each_quorum_was_formed(history),
        _quorum_ids_rise(history.managers),
        _no_step_with_a_no_commits(history.managers),
        _a_group_decides_once(history),
    ]


def _each_process_goes_forward(processes: Sequence[Process]) -> Rule:
    rule = Rule("a rank commits each step once and in order, and skips steps only to heal")
    for process in processes:
        for before, now in zip(process.commits, process.commits[1:], strict=False):
            rule.check(
                now.quorum_id >= before.quorum_id,
                f"{now.where}: {process.name} commits under quorum {now.quorum_id} after quorum {before.quorum_id}",
            )
            is_next = now.step == before.step + 1 or (now.step > before.step and now.follows_heal)
            rule.check(
                is_next, f"{now.where}: {process.name} commits step {now.step} after step {before.step}, without a heal"
            )
    return rule


def _ranks_of_a_group_agree(processes: Sequence[Process], skew_s: float) -> Rule:
    rule = Rule("a step that a rank commits is committed by the other ranks of its group")
    by_group: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        by_group[process.group].append(process)
    for group in by_group.values():
        committed = [{(commit.step, commit.quorum_id) for commit in process.commits} for process in group]
        for process in group:
            for commit in process.commits:
                for other, others in zip(group, committed, strict=True):
                    first = other.commits[0] if other.commits else None
                    was_there = first is not None and (first.quorum_id, first.step) <= (commit.quorum_id, commit.step)
                    if other.rank != process.rank and was_there and other.ended_at > commit.at + skew_s:
                        rule.check(
                            (commit.step, commit.quorum_id) in others,
                            f"{commit.where}: {process.name} commits step {commit.step} under quorum "
                            f"{commit.quorum_id}, but rank {other.rank} does not",
                        )
    return rule


def _no_commit_is_taken_back(processes: Sequence[Process], skew_s: float) -> Rule:
    """Check that a step is not committed again, under a later quorum, while a rank that has committed it is alive."""
    rule = Rule("a committed step is not committed again while a rank that holds it lives")
    by_step: dict[int, dict[int, list[tuple[Commit, Process]]]] = defaultdict(lambda: defaultdict(list))
    for process in processes:
        for commit in process.commits:
            by_step[commit.step][commit.quorum_id].append((commit, process))
    for step, by_quorum in by_step.items():
        holders: list[Process] = []
        for quorum_id, commits in sorted(by_quorum.items()):
            first = min((commit for commit, _ in commits), key=lambda commit: commit.at)
            alive = [process for process in holders if process.ended_at > first.at + skew_s]
            names = ", ".join(process.name for process in alive)
            rule.check(
                not alive, f"{first.where}: step {step} is committed again under quorum {quorum_id}; {names} holds it"
            )
            holders += [process for _, process in commits]
    return rule


def _states_are_equal(processes: Sequence[Process]) -> Rule:
    rule = Rule("the states of all participants are equal, bit for bit")
    known: dict[tuple[int, int, int], State] = {}
    for process in processes:
        for state in process.states:
            first = known.setdefault((process.rank, state.step, state.quorum_id), state)
            if first is not state:
                rule.check(
                    state.digest == first.digest,
                    f"{state.where}: {process.name} has another state of step {state.step} than {first.where}",
                )
    return rule


def _an_id_names_one_list(formed: Sequence[Formed]) -> Rule:
    rule = Rule("a quorum_id names one list of groups, whichever lighthouse logged it")
    known: dict[tuple[str, int], Formed] = {}
    for quorum in formed:
        first = known.setdefault((quorum.job, quorum.quorum_id), quorum)
        rule.check(
            first.groups == quorum.groups,
            f"{quorum.where}: quorum {quorum.quorum_id} has other groups than {first.where}",
        )
    return rule


def _only_participants_commit(history: History) -> Rule:
    rule = Rule("only participants of a quorum commit under it")
    jobs = {quorum.job for quorum in history.formed}
    if len(jobs) != 1:
        return rule  # without a log of a lighthouse, or with several jobs, a trace does not say which list applies
    lists = {quorum.quorum_id: quorum for quorum in history.formed}
    for process in history.processes:
        for commit in process.commits:
            quorum = lists.get(commit.quorum_id)
            if quorum is not None and not quorum.is_cut:
                rule.check(
                    process.group in quorum.groups,
                    f"{commit.where}: {process.group} commits under quorum {commit.quorum_id}, which is {quorum.where}",
                )
    return rule


def _each_quorum_was_formed(history: History) -> Rule:
    """Check that lighthouses logged every quorum in use. Skip ids outside the logged range: logs may be rotated."""
    rule = Rule("commits and managers name only quorums that a lighthouse has formed")
    formed = {quorum.quorum_id for quorum in history.formed}
    if len({quorum.job for quorum in history.formed}) != 1:
        return rule
    named = [(commit.quorum_id, commit.where) for process in history.processes for commit in process.commits]
    named += [received for manager in history.managers for received in manager.received]
    for quorum_id, where in named:
        if min(formed) <= quorum_id <= max(formed):
            rule.check(quorum_id in formed, f"{where}: no lighthouse has logged quorum {quorum_id}")
    return rule


def _quorum_ids_rise(managers: Sequence[Manager]) -> Rule:
    rule = Rule("the quorum_ids that a manager receives never decrease")
    for manager in managers:
        for (before, _), (now, where) in zip(manager.received, manager.received[1:], strict=False):
            rule.check(now >= before, f"{where}: {manager.group} receives quorum {now} after quorum {before}")
    return rule


def _by_step(managers: Iterable[Manager]) -> Iterator[tuple[str, list[LoggedVote]]]:
    """Group the answers to votes by replica group, quorum and step. Yield (replica_id, answers) for each."""
    by_step: dict[tuple[str, int, int], list[LoggedVote]] = defaultdict(list)
    for manager in managers:
        for answer in manager.answers:
            by_step[manager.group, answer.quorum_id, answer.step].append(answer)
    return ((group, answers) for (group, _, _), answers in by_step.items())


def _no_step_with_a_no_commits(managers: Sequence[Manager]) -> Rule:
    rule = Rule("a manager commits no step for which a rank voted no")
    for group, answers in _by_step(managers):
        noes = [answer.where for answer in answers if not answer.is_yes]
        commits = [answer.where for answer in answers if answer.commits]
        text = f"{', '.join(commits)}: {group} commits step {answers[0].step}, and {', '.join(noes)} is a no"
        rule.check(not noes or not commits, text)
    return rule


def _a_group_decides_once(history: History) -> Rule:
    """Check that all ranks in a group received the same decision on a step, according to logs and traces.

    Groups of one rank are skipped: the rank's own vote decides, so its manager may log a committed step as discarded.
    """
    rule = Rule("the ranks of a group receive one decision on a step, also from a restarted manager")
    managers = [manager for manager in history.managers if manager.ranks > 1]
    for group, answers in _by_step(managers):
        by_decision = {answer.commits: answer for answer in answers}
        where = " and ".join(answer.where for answer in by_decision.values())
        rule.check(len(by_decision) == 1, f"{where}: {group} has two decisions on step {answers[0].step}")
    told = {(m.group, answer.rank, answer.quorum_id, answer.step): answer for m in managers for answer in m.answers}
    for process in history.processes:
        for commit in process.commits:
            answer = told.get((process.group, process.rank, commit.quorum_id, commit.step))
            if answer is not None:
                text = f"{commit.where}: {process.name} commits step {commit.step}, which {answer.where} discards"
                rule.check(answer.commits, text)
    return rule


def summary(history: History) -> str:
    groups = {process.group for process in history.processes}
    commits = [commit for process in history.processes for commit in process.commits]
    steps, quorums = {commit.step for commit in commits}, {commit.quorum_id for commit in commits}
    return (
        f"{len(groups)} groups, {len(history.processes)} processes, {len(commits)} commits of {len(steps)} steps under "
        f"{len(quorums)} quorums; logged: {len(history.formed)} quorums by lighthouses, "
        f"{sum(len(manager.answers) for manager in history.managers)} votes by managers"
    )


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--clock-skew",
    type=Duration(),
    default="1s",
    show_default=True,
    help="Largest difference between the hosts' clocks.",
)
@reports_errors
def check_history(folder: Path, clock_skew: float) -> None:
    """Check a job's logs against what Lighthouse promises.

    FOLDER contains the ranks' traces (--trace-dir) and the logs of managers and lighthouses, in any order and depth.
    Exits with status 1 if the logs contradict a promise, and with 2 if they contain no commits or cannot be read.
    """
    try:
        history = read(folder)
    except OSError as e:
        raise click.UsageError(f"cannot read {e.filename or folder}: {e.strerror}; nothing was checked") from None
    if not any(process.commits for process in history.processes):
        raise click.UsageError(f"no trace below {folder} has a commit: start the groups with --trace-dir")
    rules = check(history, clock_skew)
    violations = [violation for rule in rules for violation in rule.violations]
    try:
        click.echo(summary(history))
        for rule in rules:
            state = "BROKEN" if rule.violations else "kept" if rule.checks else "-"
            broken = f"{len(rule.violations):,} of " if rule.violations else ""
            click.echo(f"{state:<7} {rule.text}  ({broken}{rule.checks:,} checks)")
    except BrokenPipeError:
        drop_stdout()
    for violation in violations[:SHOWN]:
        click.echo(violation, err=True)
    if violations:
        sys.exit(1)
