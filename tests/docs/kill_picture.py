"""The recording in README.md: `python -m tests.docs.kill_picture docs/kill.svg`.

Three replica groups train on this machine. The training process of one gets SIGKILL, and its supervisor restarts it.
The SVG replays the run in real time: a dot per committed step, the daemons' log lines, the hashes of the weights.
"""

import json
import os
import signal
import sys
import tempfile
import time
from datetime import datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from examples.demo_report import EventFiles
from examples.supervised_cluster import SupervisedCluster

PACE_S, BEFORE_S, AFTER_S, HOLD_S = 0.2, 4.0, 6.0, 3.5
LEFT, RIGHT, LINE_CHARACTERS = 100, 476, 67
GREEN, RED, AMBER, WHITE, GRAY = "#3fb950", "#ff7b72", "#e3b341", "#f0f6fc", "#9da7b3"
LINES = {  # events of the daemons' logs, by the color of their line
    "rank_ended": RED, "rank_failed": RED, "ranks_started": AMBER, "healed": AMBER, "quorum_formed": GREEN,
}  # fmt: skip
Line = tuple[float, str, str]  # time, color, text


def record(folder: Path) -> tuple[float, int, list[dict[str, Any]], list[Line]]:
    """Run it; the time of the kill, the process killed, every committed step with its group, and log lines."""
    os.environ |= {"LIGHTHOUSE_LOG_FORMAT": "json", "LIGHTHOUSE_MANAGER_LOG_FORMAT": "json"}
    train = ["--steps", "1000000", "--pace", str(PACE_S)]
    lighthouse = ["--heartbeat-timeout", "2s", "--min-replicas", "2"]
    cluster = SupervisedCluster(folder, groups=3, ranks=1, train_arguments=train, lighthouse_arguments=lighthouse)
    files, steps, killed_at, victim = EventFiles(folder), [], 0.0, 0
    with cluster:
        cluster.start()
        full_since = back_since = None
        while back_since is None or time.time() < back_since + AFTER_S:
            time.sleep(0.02)
            new = [event | {"group": name.partition("-rank-")[0]} for name, event in files.new() if "step" in event]
            steps += new
            if full_since is None and any(step["participants"] == 3 for step in new):
                full_since = time.time()
            if full_since and not killed_at and time.time() > full_since + 2 * BEFORE_S:
                victim = next(step["pid"] for step in reversed(steps) if step["group"] == "group-1")
                killed_at = time.time()
                os.kill(victim, signal.SIGKILL)
            if killed_at and any(step["group"] == "group-1" and step["pid"] != victim for step in new):
                back_since = back_since or time.time()
    logs = [json.loads(line) for path in folder.glob("*.log") for line in path.read_text().splitlines() if line[:1] == "{"]
    lines = [(datetime.fromisoformat(log["time"]).timestamp(), LINES[log["event"]], log["message"])
             for log in logs if log.get("event") in LINES]  # fmt: skip
    return killed_at, victim, steps, sorted(line for line in lines if line[0] > killed_at)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        recorded = record(Path(name))
        import shutil; shutil.copytree(name, "/tmp/kill-logs", dirs_exist_ok=True)
    Path("/tmp/recorded.json").write_text(json.dumps(recorded))
