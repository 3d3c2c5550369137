"""The recording in README.md: `python -m tests.docs.kill_picture docs/kill.svg`.

Three replica groups train on this machine. The training process of one gets SIGKILL, and its supervisor restarts it.
The SVG replays that run in real time: a dot per committed step, lines of the logs, and the hash of the weights.
"""

import os
import re
import signal
import sys
import tempfile
import textwrap
import time
from html import escape
from pathlib import Path

from examples.demo_report import EventFiles
from examples.supervised_cluster import SupervisedCluster

PACE_S, BEFORE_S, AFTER_S, HOLD_S = 0.25, 3.0, 5.0, 4.0
PEER, VICTIM = "group-0", "group-1"
GREEN, RED, AMBER, WHITE, GRAY = "#3fb950", "#ff7b72", "#e3b341", "#f0f6fc", "#9da7b3"
LEFT, RIGHT, CHARACTERS = 100, 505, 62
HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 HEIGHT" width="800" role="img">
<title>Three replica groups train. One is killed and rejoins; the others keep training.</title>
<style>text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'Liberation Mono',monospace}}.end{{text-anchor:end}}
.caption{{font:600 17px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}}</style>
<rect x="1" y="1" width="638" height="99%" rx="10" fill="#0d1117" stroke="#3d444d"/>
<path d="M{LEFT} 76H{RIGHT}M{LEFT} 112H{RIGHT}M{LEFT} 148H{RIGHT}M1 172H639" stroke="#30363d" stroke-width="1.5"/>
"""


class Run:
    """Times of a run, its committed steps, and when each line of a group's log was first seen."""

    def __init__(self, folder: Path) -> None:
        self.victim, self.killed_at, self.back_at, full_at = 0, 0.0, 0.0, 0.0
        self.steps: list[dict] = []
        self._lines: dict[tuple[str, str], float] = {}
        train = ["--steps", "99999", "--pace", str(PACE_S)]
        files, cluster = EventFiles(folder), SupervisedCluster(folder, groups=3, ranks=1, train_arguments=train)
        with cluster:
            cluster.start()
            while not self.back_at or time.time() < self.back_at + AFTER_S:
                time.sleep(0.01)
                texts = [(log.stem, line) for log in folder.glob("*.log") for line in log.read_text().splitlines()]
                self._lines = dict.fromkeys(texts, time.time()) | self._lines
                for group, step in ((name.partition("-rank")[0], step) for name, step in files.new() if "step" in step):
                    self.steps.append(step | {"group": group})
                    full_at = full_at or (step["time"] if step["participants"] == 3 else 0.0)
                    if group == VICTIM and self.killed_at and step["pid"] != self.victim:
                        self.back_at = self.back_at or step["time"]
                if not self.killed_at and full_at and time.time() > full_at + 2 * BEFORE_S:
                    self.victim = next(step["pid"] for step in reversed(self.steps) if step["group"] == VICTIM)
                    os.kill(self.victim, signal.SIGKILL)
                    self.killed_at = time.time()

    def line(self, group: str, message: str) -> tuple[float, str]:
        """When the log of `group` got a line with that message after the kill, and the message."""
        pattern = re.compile(rf"\S.*: ({message}.*)")  # output that the supervisor repeats is indented
        later = ((at, text) for (of, text), at in self._lines.items() if of == group and at > self.killed_at)
        return next((at, found[1]) for at, text in later if (found := pattern.fullmatch(text)))


def draw(run: Run) -> str:
    began, length_s = run.killed_at - BEFORE_S, BEFORE_S + run.back_at - run.killed_at + AFTER_S
    loop_s, elements, marks = round(length_s + HOLD_S, 1), list[str](), list[str]()

    def x(at: float) -> float:
        return LEFT + (RIGHT - LEFT) * (at - began) / length_s

    def text(x: int, y: int, color: str, text: str, since: float = 0, until: float = 1e12, kind: str = "") -> None:
        from_, to = (min(max(0.0, (at - began) / loop_s), 1.0) for at in (since, until))
        elements.append(
            f'<text x="{x}" y="{y}" fill="{color}" class="{kind}" opacity="{int(to == 1)}">{escape(text)}'
            f'<animate attributeName="opacity" values="0;1;0;0" keyTimes="0;{from_:.4f};{to:.4f};1" '
            f'calcMode="discrete" dur="{loop_s}s" repeatCount="indefinite"/></text>'
        )

    steps = [step for step in run.steps if began <= step["time"] < began + length_s]
    next_at = next(step["time"] for step in steps if step["participants"] == 2)
    text(24, 36, WHITE, "Three groups train one model. Each dot is a step.", 0, run.killed_at, "caption")
    pause, away = f"{next_at - run.killed_at:.2f} s", f"{run.back_at - run.killed_at:.1f} s"
    text(24, 36, RED, f"kill -9. The others continue after {pause}.", run.killed_at, run.back_at, "caption")
    text(24, 36, GREEN, f"It is back after {away}, with its peers' weights.", run.back_at, kind="caption")
    absent = [(run.killed_at, RED, "killed"), (run.line(VICTIM, "started rank")[0], AMBER, "recovering")]
    for y, group in zip((76, 112, 148), sorted({step["group"] for step in steps}), strict=True):
        text(24, y + 5, WHITE, group)
        states = [(s["time"], GREEN, f"step {s['step']}") for s in steps if s["group"] == group]
        marks += [f'<circle cx="{x(at):.1f}" cy="{y}" r="3" fill="{GREEN}"/>' for at, _, _ in states]
        states = sorted(states + absent) if group == VICTIM else states
        for (since, color, state), until in zip(states, [*(at for at, _, _ in states[1:]), 1e12], strict=True):
            text(616, y + 5, color, state, since, until, "end")
            if color != GREEN:
                marks.append(f'<path d="M{x(since):.1f} {y}H{x(until):.1f}" stroke="{color}" stroke-width="6"/>')
    elements.append(
        f'<clipPath id="played"><rect x="{LEFT - 6}" y="40" width="420" height="130"><animate attributeName="width" '
        f'values="6;{RIGHT - LEFT + 6};420" keyTimes="0;{length_s / loop_s:.4f};1" dur="{loop_s}s" '
        f'repeatCount="indefinite"/></rect></clipPath><g clip-path="url(#played)">{"".join(marks)}</g>'
    )
    y, last = 200, max(step["step"] for step in steps if step["group"] == VICTIM)
    [weights] = {step["hash"] for step in steps if step["step"] == last}
    for color, who, (at, line) in (
        (GRAY, "$ ", (0, f"lighthouse-manager run --replica-id {VICTIM} ... train_ddp.py")),
        (WHITE, "$ ", (run.killed_at, f"kill -9 {run.victim}")),
        (RED, f"{VICTIM}: ", run.line(VICTIM, "rank 0 [^;]*SIGKILL")),
        (GREEN, f"{PEER}: ", run.line(PEER, r"quorum \d+.* 2 (?:groups|in it)")),
        (AMBER, f"{VICTIM}: ", run.line(VICTIM, "healed from")),
        (WHITE, "", (began + length_s, f"step {last}: all three groups have the weights {weights[:12]}")),
    ):
        text(80, y, GRAY, f"{at - run.killed_at:.2f} s" if at else "", at, kind="end")
        for part in textwrap.wrap(who + line, CHARACTERS):
            text(LEFT, y, color, part, at)
            y += 21
    return HEAD.replace("HEIGHT", str(y)) + "\n".join(elements) + "\n</svg>\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        Path(sys.argv[1]).write_text(draw(Run(Path(name))))
