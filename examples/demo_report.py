"""Events that the demo's participants have logged, and the check that nothing was lost."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

MIN_ACCURACY = 0.95


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL that the demo sent to ranks of a group."""

    at: float  # seconds since the epoch
    victim: str  # name of the group
    what: str  # ranks that received it


@dataclass(slots=True)
class EventFiles:
    """Reads the events that were added to the participants' files since the last read."""

    folder: Path
    _read: dict[Path, int] = field(default_factory=dict)

    def new(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (file name, event) for each new event, sorted by time."""
        events: list[tuple[str, dict[str, Any]]] = []
        for path in sorted(self.folder.glob("*-start-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + (len(whole) + 1 if whole else 0)
            events += [(path.name, json.loads(line)) for line in whole.splitlines()]
        return sorted(events, key=lambda entry: entry[1]["time"])


@dataclass(slots=True)
class Report:
    """All logged events, by step and participant."""

    groups: int
    kills: list[Kill] = field(default_factory=list)
    commits: dict[int, dict[str, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    discards: int = 0

    def add(self, participant: str, event: dict[str, Any]) -> None:
        if "step" in event:
            self.commits[event["step"]][participant] = event
        elif "finished" in event:
            self.finished[participant] = event
        elif "discarded" in event:
            self.discards += 1

    @property
    def last_step(self) -> int:
        return max(self.commits, default=0)

    def participants(self, step: int) -> int:
        return max(event["participants"] for event in self.commits[step].values())

    def loss(self, step: int) -> float:
        """Return the mean loss of the contributors. A healing group's loss is left out, as its weights are outdated."""
        losses = [event["loss"] for event in self.commits[step].values() if event["contributed"]]
        return sum(losses) / len(losses) if losses else float("nan")

    def full_share(self) -> float:
        """Return the share of the committed steps in which all groups took part."""
        full = sum(self.participants(step) == self.groups for step in self.commits)
        return full / len(self.commits) if self.commits else 0.0

    def differing_steps(self) -> list[int]:
        """Return the steps for which participants logged different quorums or different hashes of the weights."""
        return [
            step
            for step, by_participant in sorted(self.commits.items())
            if len({(event["quorum_id"], event["hash"]) for event in by_participant.values()}) != 1
        ]

    def pause_s(self, kill: Kill) -> float:
        """Return the longest time in seconds without a commit by a survivor, in the minute after `kill`."""
        times = sorted(
            event["time"]
            for by_participant in self.commits.values()
            for name, event in by_participant.items()
            if not name.startswith(f"{kill.victim}-")
        )
        later = [kill.at, *(time for time in times if kill.at < time < kill.at + 60.0)]
        return max((after - before for before, after in pairwise(later)), default=float("inf"))

    def weights(self) -> dict[str, str]:
        """Return the SHA-256 of each participant's final weights."""
        return {name: event["hash"] for name, event in sorted(self.finished.items())}

    def accuracy(self) -> float:
        return min((event["accuracy"] for event in self.finished.values()), default=0.0)

    def problems(self, steps: int, ranks: int) -> list[str]:
        """Return the reasons why this run has failed, or an empty list."""
        differing, found = self.differing_steps(), []
        if self.last_step < steps:
            found.append(f"the survivors stopped at step {self.last_step} of {steps}")
        if differing:
            found.append(
                f"weights or quorum differ between participants at {len(differing)} steps, first {differing[0]}"
            )
        if len(set(self.weights().values())) != 1 or len(self.finished) != self.groups * ranks:
            found.append(f"{len(self.finished)} of {self.groups * ranks} ranks ended, with {self.weights()}")
        if self.commits and self.participants(self.last_step) < self.groups:
            found.append("a killed group had not returned when the training ended; give it time: --steps 3000")
        if self.accuracy() < MIN_ACCURACY:
            found.append(f"test accuracy {self.accuracy():.1%} is below {MIN_ACCURACY:.0%}")
        return found
