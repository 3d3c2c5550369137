"""Train three replica groups on this machine, kill one and later a rank of another, and show that nothing is lost.

Each group runs under a supervisor. Every participant logs (step, quorum_id, participants, hash of its weights) for each
step that it commits, and the demo compares these records. It exits with status 1 if any of them differ, if a killed
group did not return, if the test accuracy is below 95%, or if the survivors stopped.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from examples.daemons import ClusterError, end_by_signals
from examples.demo_report import EventFiles, Kill, Report
from examples.demo_screen import LiveScreen, PlainScreen, Row, make_screen
from examples.supervised_cluster import Group, SupervisedCluster

POLL_S = 0.1
STOPPED_AFTER_S = 120.0
LIGHTHOUSE = ("--min-replicas", "2", "--heartbeat-timeout", "2s")


class Demo:
    def __init__(
        self, cluster: SupervisedCluster, screen: LiveScreen | PlainScreen, steps: int, kill_at: list[int]
    ) -> None:
        self.cluster = cluster
        self.report = Report(len(cluster.groups))
        self._screen = screen
        self._files = EventFiles(cluster.folder)
        self._rows = {group.name: Row(group.name) for group in cluster.groups}
        self._steps = steps
        everyone, last = tuple(range(cluster.ranks)), (cluster.ranks - 1,)
        self._due = list(zip(kill_at, (cluster.groups[1], cluster.groups[0]), (everyone, last), strict=True))
        self._progress = (0, time.monotonic())

    def run(self) -> None:
        """Run until every group has finished, or until no step has been committed for STOPPED_AFTER_S."""
        while not all(self.cluster.has_ended(group) for group in self.cluster.groups):
            self._read()
            self._kill_when_due()
            self._screen.show(list(self._rows.values()))
            if self._is_stuck():
                self._screen.say(f"nothing has moved for {STOPPED_AFTER_S:.0f} s")
                break
            time.sleep(POLL_S)
        self._read()
        self._screen.show(list(self._rows.values()))
        self._say_who_failed()

    def _say_who_failed(self) -> None:
        for group in self.cluster.groups:
            if status := group.supervisor.status:
                last_words = group.log.read_text(errors="replace")[-1500:]
                self._screen.say(escape(f"{group.name}'s supervisor ended with status {status}:\n{last_words}"))

    def _read(self) -> None:
        for participant, event in self._files.new():
            self.report.add(participant, event)
            name, _, rest = participant.partition("-rank-")
            rank = int(rest.partition("-")[0])
            self.cluster.note_pid(name, rank, event["pid"])
            if rank == 0:
                self._note(self._rows[name], event)

    def _note(self, row: Row, event: dict[str, Any]) -> None:
        if "step" in event:
            if row.state != "training":
                row.last_event = f"trains from step {event['step']}"
            row.state, row.step, row.loss = "training", event["step"], event["loss"]
            row.quorum_id, row.participants = event["quorum_id"], event["participants"]
        elif "discarded" in event:
            row.last_event = f"discarded step {event['discarded']}"
        elif "finished" in event:
            row.state, row.last_event = "finished", f"test accuracy {event['accuracy']:.1%}"

    def _kill_when_due(self) -> None:
        step = self.report.last_step
        if not self._due or step < self._due[0][0] or self.report.participants(step) < self.report.groups:
            return
        _, group, ranks = self._due.pop(0)
        what = "every rank" if len(ranks) == self.cluster.ranks else f"rank {ranks[0]}"
        self.report.kills.append(Kill(time.time(), group.name, what))
        self.cluster.kill_ranks(group, *ranks)
        self._mark(group, "killed", f"SIGKILL to {what}")

    def _mark(self, group: Group, state: str, event: str) -> None:
        self._rows[group.name].state, self._rows[group.name].last_event = state, event
        self._screen.say(f"step {self.report.last_step}: {group.name}: {event}")

    def _is_stuck(self) -> bool:
        step, since = self._progress
        moved = self.report.last_step + len(self.report.finished)
        if moved > step:
            self._progress = (moved, time.monotonic())
        return time.monotonic() - since > STOPPED_AFTER_S


def summarise(report: Report, console: Console, seconds: float, problems: list[str]) -> None:
    console.print(
        f"\n[bold]{report.last_step} steps[/] in {seconds:.0f} s, {report.full_share():.0%} of them with all groups"
    )
    for kill in report.kills:
        pause = report.pause_s(kill)
        console.print(f"kill: {kill.victim}, {kill.what}: {pause:.2f} s without a committed step", highlight=False)
    console.print(f"test accuracy {report.accuracy():.1%}", highlight=False)
    for participant, digest in report.weights().items():
        name = participant.partition("-start-")[0].replace("-rank-", " rank ")
        console.print(f"{name}: weights {digest}", highlight=False, soft_wrap=True)
    for problem in problems:
        console.print(f"[red]FAILED:[/] {escape(problem)}", soft_wrap=True)
    if not problems:
        compared = sum(len(by_participant) for by_participant in report.commits.values())
        console.print(f"[green]nothing was lost:[/] {compared} logged commits agree in quorum and weights")


@contextmanager
def log_folder(wanted: Path | None) -> Generator[Path, None, None]:
    """Yield the folder `wanted` after deleting its contents, or a temporary folder if `wanted` is None."""
    if wanted is not None:
        shutil.rmtree(wanted, ignore_errors=True)
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="lighthouse-demo-") as folder:
        yield Path(folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="ranks per group")
    parser.add_argument(
        "--kill-at", type=int, nargs=2, default=[300, 800], metavar="STEP", help="steps of the two kills"
    )
    parser.add_argument("--pace", type=float, default=0.05, help="minimum duration of a step in seconds")
    parser.add_argument("--plot", type=Path, help="draw loss and participants over time into this file")
    parser.add_argument("--logs", type=Path, help="keep every process's log in this folder, which is emptied first")
    args = parser.parse_args()
    if args.groups < 3 or args.ranks < 1 or not 0 < args.kill_at[0] < args.kill_at[1] < args.steps:
        parser.error("needs --groups of at least 3, --ranks of at least 1, and two kills in order before --steps")
    return args


def main() -> int:
    args = parse_arguments()
    end_by_signals()
    console = Console()
    console.print(f"starting a lighthouse and {args.groups} groups of {args.ranks} ranks, each by its supervisor ...")
    train = ["--steps", str(args.steps), "--pace", str(args.pace)]
    with log_folder(args.logs) as folder:
        cluster = SupervisedCluster(
            folder, groups=args.groups, ranks=args.ranks, train_arguments=train, lighthouse_arguments=LIGHTHOUSE
        )
        with cluster, make_screen(console, args.steps) as screen:
            try:
                cluster.start()
            except ClusterError as e:
                console.print(f"[red]FAILED:[/] {escape(str(e))}")
                return 1
            began_at = time.monotonic()
            demo = Demo(cluster, screen, args.steps, args.kill_at)
            demo.run()
        problems = demo.report.problems(args.steps, args.ranks)
        summarise(demo.report, console, time.monotonic() - began_at, problems)
        if args.plot and demo.report.commits:
            from examples.demo_plot import plot

            plot(demo.report, args.plot)
            console.print(f"drawn into {args.plot}", soft_wrap=True)
    return bool(problems)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
