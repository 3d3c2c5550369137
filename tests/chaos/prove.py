"""The long run: eight groups in network namespaces, with a fault of some kind every few seconds, and nothing lost.

    make prove PART=3        # two hours; the part's number is its seed
    python -m tests.chaos.prove 3 --minutes 10 --folder /tmp/part-3
    python -m tests.chaos.prove 3 --replay 17 --replay 230    # only these faults of part 3, a minute for each

A part first trains without faults, which measures the pace. Then it strikes, and starts again whatever has died. At its
end the ranks' own records and the traces (`lighthouse check-history`) have to agree that every step was committed once
with equal weights and that each sample was used once an epoch. The result is a JSON file and the exit status.
"""

import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import click

from examples.daemons import ROOT, Daemon, command
from lighthouse.cli.check_history import check, read
from tests.agent_client.ranks import Rank, RankServer
from tests.chaos.proving_rank import BATCH_SIZE, SAMPLES

GROUPS = 8
EVERY_S = 3.0
SETTLED_S = 30.0
REPLAY_S = 60.0
STARTS_WITHIN_S, STARTED_STEPS = 300.0, 50
LIGHTHOUSE_PORT, MANAGER_PORT, STORE_PORT = 29510, 29512, 29502
TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "3s", "--lease", "3s")
SCRIPT = Path(__file__).with_name("proving_rank.py")
SAMPLE_EVERY_S = 30.0
STALLED_S = 20.0  # no fault strikes while no step has been committed for so long
PRELOADED = (
    "torch.optim",
    "agent_client.training.ddp",
    "agent_client.training.optimizer",
    "agent_client.training.sampler",
)


def run(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, capture_output=True, timeout=30)


class Network:
    """A bridge with a cable to each host. The lighthouse is at its first address.

    Parts with different numbers have different addresses, so they can run at the same time.
    """

    def __init__(self, part: int, hosts: int) -> None:
        self.subnet = f"198.18.{part % 256}"
        self.bridge, self.address = f"lhb{os.getpid()}", f"{self.subnet}.1"
        self.hosts = [Host(self, number) for number in range(hosts)]

    @contextmanager
    def up(self) -> Iterator[None]:
        try:
            run("ip", "link", "add", self.bridge, "type", "bridge")
            run("ip", "addr", "add", f"{self.address}/24", "dev", self.bridge)
            run("ip", "link", "set", self.bridge, "up")
            for host in self.hosts:
                host.set_up()
            yield
        finally:
            for host in self.hosts:
                run("ip", "netns", "del", host.name, check=False)
            run("ip", "link", "del", self.bridge, check=False)


class Host:
    """A network namespace with one cable."""

    def __init__(self, network: Network, number: int) -> None:
        self.name, self.address = f"lhn{os.getpid()}-{number}", f"{network.subnet}.{number + 10}"
        self._network, self._cable = network, f"lhc{os.getpid() % 10**6}-{number}"

    @property
    def within(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def set_up(self) -> None:
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", self._cable, "master", self._network.bridge, "up")
        for words in (("addr", "add", f"{self.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            run("ip", "-n", self.name, *words)
        run("ip", "-n", self.name, "link", "set", "lo", "up")

    def cut(self) -> None:
        run("ip", "link", "set", self._cable, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self._cable, "up")

    def slow(self) -> None:
        run(
            "tc",
            "qdisc",
            "add",
            "dev",
            self._cable,
            "root",
            "tbf",
            "rate",
            "2mbit",
            "burst",
            "16kb",
            "latency",
            "200ms",
        )

    def quicken(self) -> None:
        run("tc", "qdisc", "del", "dev", self._cable, "root", check=False)


class Group:
    """A manager, a store and a rank on a host of their own."""

    def __init__(self, name: str, host: Host, lighthouse: str, folder: Path, servers: ExitStack) -> None:
        self.name, self.host, self._folder = name, host, folder
        self.forks = servers.enter_context(RankServer(*PRELOADED, within=host.within))
        self.rank: Rank | None = None
        self.store: Rank | None = None
        options = [
            *("serve", "--lighthouse", lighthouse, "--replica-id", name, "--group-world-size", "1"),
            *("--bind", f"{host.address}:{MANAGER_PORT}", "--advertise", host.address),
            *("--store", f"{host.address}:{STORE_PORT}"),
        ]
        self.manager = Daemon(name, [*host.within, *command("manager", options)], folder / f"{name}-manager.log")
        self._environment = {
            "LIGHTHOUSE_MANAGER_ADDRESS": f"{host.address}:{MANAGER_PORT}",
            "LIGHTHOUSE_MANAGER_ADVERTISE": host.address,
            "LIGHTHOUSE_TRACE_DIR": str(folder / "history"),
            "REPLICA_GROUP_ID": name,
            "MASTER_ADDR": host.address,
            "MASTER_PORT": "29500",
            "RANK": "0",
            "WORLD_SIZE": "1",
        }

    def start(self) -> None:
        """Start what does not run."""
        if self.store is None or self.store.status is not None:
            self.store = self.forks.start("tests.agent_client.actors:StoreActor")
            self.store.call("serve", STORE_PORT)
        if not self.manager.is_alive:
            self.manager.start()
        if self.rank is None or self.rank.status is not None:
            events = self._folder / f"{self.name}.events"
            self.rank = self.forks.run(SCRIPT, [str(events)], self._environment, self._folder / f"{self.name}-rank.log")

    def kill(self) -> None:
        for rank in (self.rank, self.store):
            if rank is not None:
                rank.kill()
        self.manager.kill()
        self.rank = self.store = None


@dataclass(slots=True)
class Job:
    """All that runs, and what is to be undone at which time."""

    part: int
    lighthouse: Daemon
    groups: Sequence[Group]
    folder: Path
    draws: random.Random = field(default_factory=random.Random)
    faults: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])  # time (Unix) and kind
    undo: list[tuple[float, Callable[[], None]]] = field(default_factory=list[tuple[float, Callable[[], None]]])

    def draw(self, number: int) -> "tuple[Fault, Group]":
        """Return fault `number` of the part. It depends on nothing else, so it can be drawn again."""
        self.draws.seed(f"{self.part}:{number}")
        [fault] = self.draws.choices(list(FAULTS), list(FAULTS.values()))
        return fault, self.draws.choice(self.groups)

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        self.undo.append((time.monotonic() + after_s, action))

    def pause(self, pid: int, for_s: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        self.later(for_s, lambda: _signal(pid, signal.SIGCONT))

    def is_stalled(self) -> bool:
        """Return whether no rank has committed a step for STALLED_S. Further faults might destroy the last copy."""
        written_at = [path.stat().st_mtime for path in self.folder.glob("*.events")]
        return time.time() > max(written_at, default=0.0) + STALLED_S

    def tend(self) -> None:
        """Undo what is due, and start again whatever has died."""
        now = time.monotonic()
        due = [action for at, action in self.undo if at <= now]
        self.undo = [(at, action) for at, action in self.undo if at > now]
        for action in due:
            action()
        if not self.lighthouse.is_alive and not self.undo:
            self.lighthouse.start()
        for group in self.groups:
            group.start()


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_rank(job: Job, group: Group) -> None:
    assert group.rank is not None
    group.rank.signal(signal.SIGKILL)


def kill_group(job: Job, group: Group) -> None:
    group.kill()


def kill_manager(job: Job, group: Group) -> None:
    group.manager.kill()


def stop_rank(job: Job, group: Group) -> None:
    assert group.rank is not None
    job.pause(group.rank.pid, job.draws.uniform(0.1, 4.0))


def stop_manager(job: Job, group: Group) -> None:
    job.pause(group.manager.pid, job.draws.uniform(0.1, 4.0))


def cut_link(job: Job, group: Group) -> None:
    group.host.cut()
    job.later(job.draws.uniform(0.1, 5.0), group.host.mend)


def slow_link(job: Job, group: Group) -> None:
    group.host.slow()
    job.later(job.draws.uniform(1.0, 5.0), group.host.quicken)


def nan(job: Job, group: Group) -> None:
    assert group.rank is not None
    group.rank.signal(signal.SIGUSR1)


def out_of_memory(job: Job, group: Group) -> None:
    assert group.rank is not None
    group.rank.signal(signal.SIGUSR2)


def kill_lighthouse(job: Job, group: Group) -> None:
    job.lighthouse.kill()
    job.later(job.draws.uniform(0.0, 2.0), job.lighthouse.start)


def stop_lighthouse(job: Job, group: Group) -> None:
    job.pause(job.lighthouse.pid, job.draws.uniform(0.1, 4.0))


Fault: TypeAlias = Callable[[Job, Group], None]

FAULTS: dict[Fault, int] = {
    kill_rank: 4,
    kill_group: 3,
    kill_manager: 2,
    stop_rank: 2,
    stop_manager: 2,
    cut_link: 3,
    slow_link: 1,
    nan: 1,
    out_of_memory: 1,
    kill_lighthouse: 1,
    stop_lighthouse: 1,
}
"""The faults, and how often each is drawn."""


def train(
    job: Job,
    seconds: float,
    numbers: Iterable[int] = (),
    every_s: float = EVERY_S,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Train for a time, and cause the faults with these numbers."""
    planned = iter(numbers)
    number = next(planned, None)
    ends_at, strikes_at = time.monotonic() + seconds, time.monotonic()
    while (now := time.monotonic()) < ends_at:
        job.tend()
        watch()
        if number is not None and now >= strikes_at and not job.undo:
            fault, group = job.draw(number)
            if job.lighthouse.is_alive and group.manager.is_alive and not job.is_stalled():
                fault(job, group)
                job.faults.append((time.time(), fault.__name__))
                strikes_at, number = max(strikes_at + every_s, now), next(planned, None)
        time.sleep(0.02)


@dataclass
class Record:
    """What the ranks' own records show."""

    steps: int = 0
    commits: int = 0
    epochs: float = 0.0
    missing: int = 0  # records of commits
    commits_at: list[float] = field(default_factory=list[float])  # first commit of each step (Unix time)
    wrong: list[str] = field(default_factory=list[str])


def examine(folder: Path) -> Record:
    """Compare the weights after each step, look for steps that were taken back, and count the uses of each sample.

    A rank that is killed between a commit and its record has used a batch that no record names. So samples may seem to
    be used too rarely, but only as many as there are in the missing records. The last step of a quorum may be repeated,
    because the ranks that committed it may have been killed.
    """
    record, hashes, uses, used_at, participants, first_at = Record(), {}, Counter[int](), {}, {}, dict[int, float]()
    began_with, ended_with = dict[int, int](), dict[int, int]()
    for path in sorted(folder.glob("*.events")):
        for line in path.read_bytes().split(b"\n"):
            if not line.endswith(b"]"):
                continue  # cut by a kill
            at, step, quorum_id, size, digest, used = json.loads(line)
            record.commits += 1
            began_with[quorum_id] = min(step, began_with.get(quorum_id, step))
            ended_with[quorum_id] = max(step, ended_with.get(quorum_id, step))
            first_at[step] = min(at, first_at.get(step, at))
            first = hashes.setdefault((step, quorum_id), digest)
            if digest != first:
                record.wrong.append(f"{path.name}: step {step} of quorum {quorum_id} has other weights")
            used_at[step, quorum_id, path.name], participants[step, quorum_id] = used, size
    newest = -1
    for quorum_id, first in sorted(began_with.items()):
        if first < newest:
            record.wrong.append(f"quorum {quorum_id} began with step {first}, and step {newest} was committed before")
        newest = max(newest, ended_with[quorum_id])
    last = {step: max(quorum for at, quorum in hashes if at == step) for step, _ in hashes}
    counted = [used for (step, quorum_id, _), used in used_at.items() if last[step] == quorum_id]
    for used in counted:
        uses.update(used)
    record.steps, record.commits_at = len(last), sorted(first_at.values())
    if record.steps:
        record.missing = sum(participants[step, quorum_id] for step, quorum_id in last.items()) - len(counted)
        record.epochs = sum(uses.values()) / SAMPLES
        most = max(uses.values())
        lacking = sum(max(0, most - 1 - uses[sample]) for sample in range(SAMPLES))
        if lacking > record.missing * BATCH_SIZE:
            record.wrong.append(f"{lacking} uses of samples are missing below {most - 1}, and {record.missing} records")
    return record


def pauses(faults: Sequence[tuple[float, str]], commits_at: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Return the longest wait for a step after a fault and before the next, in seconds: by kind, median and most."""
    longest: dict[str, list[float]] = {}
    for (at, kind), (ends_at, _) in itertools.pairwise([*faults, (math.inf, "")]):
        first, last = bisect(commits_at, at), bisect(commits_at, ends_at) + 1
        waits = [after - before for before, after in itertools.pairwise([at, *commits_at[first:last]])]
        longest.setdefault(kind, []).append(max(waits, default=0.0))
    return {kind: (round(statistics.median(each), 2), round(max(each), 2)) for kind, each in sorted(longest.items())}


def machine_cpu_s() -> float:
    """Return the CPU time that the machine has used since it started, except by processes of a lower priority."""
    user, _, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def newest_step(folder: Path) -> int:
    """Return the highest step in the last lines of the ranks' records."""
    newest = 0
    for path in folder.glob("*.events"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            whole = [line for line in file.read().split(b"\n")[1:] if line.endswith(b"]")]
        newest = max(newest, json.loads(whole[-1])[1] if whole else 0)
    return newest


def footprint(daemons: Iterable[Daemon], journal: Path) -> list[int]:
    """Return the memory in MiB, the threads and the file descriptors of all daemons, and the journal's size in KiB."""
    memory_kib = threads = descriptors = 0
    for daemon in daemons:
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines())
            descriptors += len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
            memory_kib += int(status["VmRSS"].split()[0])
            threads += int(status["Threads"])
        except (OSError, KeyError):
            continue  # it has just died
    journal_bytes = 0
    for path in journal.parent.glob(f"{journal.name}*"):
        with suppress(FileNotFoundError):
            journal_bytes += path.stat().st_size
    return [memory_kib // 1024, threads, descriptors, journal_bytes // 1024]


@click.command()
@click.argument("part", type=int)
@click.option("--minutes", default=110.0, show_default=True, help="Time with faults.")
@click.option("--replay", type=int, multiple=True, help="Cause only this fault of the part; repeatable.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep all logs there. It is emptied first.")
@click.option("--result", type=click.Path(path_type=Path), help="Write the result there.")
def main(part: int, minutes: float, replay: Sequence[int], folder: Path | None, result: Path | None) -> None:
    """Run one part of the proof, and check it. The exit status is 1 if anything was lost."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the namespaces are removed
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        report = prove(part, minutes * 60, replay, folder, stack)
    text = "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in report.items()) + "\n}"
    click.echo(text)
    if result is not None:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(text + "\n")
    if report["wrong"]:
        sys.exit(1)


def prove(part: int, seconds: float, replay: Sequence[int], folder: Path, stack: ExitStack) -> dict[str, Any]:
    network = Network(part, GROUPS)
    stack.enter_context(network.up())
    (folder / "history").mkdir()
    address = f"{network.address}:{LIGHTHOUSE_PORT}"
    serve = ["serve", "--bind", address, "--http", "127.0.0.1:0", "--insecure", "--min-replicas", "1", *TIMES]
    journal = folder / "journal.sqlite"
    serve += ["--journal", str(journal), "--log-format", "json"]
    lighthouse = Daemon("lighthouse", command("lighthouse", serve), folder / "history" / "lighthouse.log")
    stack.callback(lighthouse.kill)
    groups = [Group(f"g{n}", host, address, folder, stack) for n, host in enumerate(network.hosts)]
    for group in groups:
        stack.callback(group.kill)
    lighthouse.start()
    job, samples, began_at = Job(part, lighthouse, groups, folder), list[list[int]](), 0.0

    def watch() -> None:
        after_s = round(time.monotonic() - began_at)
        if not samples or after_s >= samples[-1][0] + SAMPLE_EVERY_S:
            prints = footprint([lighthouse, *(group.manager for group in groups)], journal)
            samples.append([after_s, len(job.faults), newest_step(folder), *prints])

    gives_up_at = time.monotonic() + STARTS_WITHIN_S
    while examine(folder).steps < STARTED_STEPS:
        train(job, 1.0)
        if time.monotonic() > gives_up_at:
            raise click.ClickException(f"nothing trains; see {folder}")
    before = examine(folder).steps
    train(job, 2 * SETTLED_S)
    calm = examine(folder).steps - before
    began_at, cpu_s = time.monotonic(), machine_cpu_s()
    if replay:
        seconds = REPLAY_S * len(replay)
        train(job, seconds, replay, REPLAY_S, watch)
    else:
        train(job, seconds, itertools.count(), EVERY_S, watch)
    cpu_s = machine_cpu_s() - cpu_s
    struck = examine(folder).steps - before - calm
    train(job, SETTLED_S)
    record = examine(folder)
    wrong = [
        *record.wrong,
        *(broken for rule in check(read(folder / "history"), skew_s=0.5) for broken in rule.violations),
    ]
    return {
        "part": part,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "seconds": round(seconds),
        "faults": len(job.faults),
        "by_kind": dict(Counter(kind for _, kind in job.faults)),
        "pause_s_median_and_most": pauses(job.faults, record.commits_at),
        "steps": record.steps,
        "commits": record.commits,
        "records_lost_by_kills": record.missing,
        "epochs": round(record.epochs, 2),
        "steps_per_s_without_faults": round(calm / (2 * SETTLED_S), 3),
        "steps_per_s_with_faults": round(struck / seconds, 3),
        "share_of_the_pace": round(struck / seconds / (calm / (2 * SETTLED_S)), 4) if calm else None,
        "cpu_hours_of_the_machine": round(cpu_s / 3600, 2),
        "load_average": round(os.getloadavg()[0], 1),
        "columns": ["second", "faults", "step", "memory_mib", "threads", "descriptors", "journal_kib"],
        "samples": samples,
        "wrong": wrong[:50],
    }


if __name__ == "__main__":
    main()
