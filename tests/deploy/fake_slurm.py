"""Slurm, the supervisor and the lighthouse as small scripts on PATH, to run train.sbatch without any of them."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .tools import DEPLOY

SCRIPT = DEPLOY / "slurm" / "train.sbatch"

_SCONTROL = """#!/bin/sh
printf 'alpha\\nbeta\\n'
"""

# As the real one: options first, then the command; a signal to srun reaches the task.
_SRUN = """#!/bin/sh
for word; do case "$word" in --nodelist=*) export NODE="${word#*=}";; esac; done
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""

_COMMON = f"""#!{sys.executable} -IS
import os, signal, sys, time

def log(event):
    with open(os.environ["LOG"], "a") as file:
        file.write(event + "\\n")

def is_first_time(name):
    try:
        os.mkdir(os.environ["LOG"] + name)
    except FileExistsError:
        return False
    return True

def end_by_sigterm(name, status):
    def end(*_):
        log(name + " terminated")
        sys.exit(status)
    signal.signal(signal.SIGTERM, end)

words = " ".join(sys.argv[1:])
"""

# Like real training it comes to no end without a lighthouse.
_SUPERVISOR = f"""{_COMMON}
group, count, node, lighthouse = (
    os.environ[name] for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "NODE", "LIGHTHOUSE_ADDRESS")
)
training = os.environ["TRAINING"]
end_by_sigterm(f"group {{group}}", 143)
log(f"group {{group}} of {{count}} on {{node}}, lighthouse {{lighthouse}}: {{words}}")
while not os.path.exists(os.environ["LOG"] + "serving") or training == "is_long":
    time.sleep(0.01)
if training == "is_stopped":
    sys.exit(130)
sys.exit(training == "fails" or training == "fails_once" and is_first_time(group) or training == node + "_fails")
"""

_LIGHTHOUSE = f"""{_COMMON}
end_by_sigterm("lighthouse", 0)
log("lighthouse " + words)
if os.environ["LIGHTHOUSE"] == "fails_once" and is_first_time("lighthouse"):
    sys.exit(1)
is_first_time("serving")
while True:
    signal.pause()
"""


class FakeSlurm:
    """Two nodes, alpha and beta; `training` and `lighthouse` of a job are words of the scripts above, or ok."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._bin = folder / "bin"
        self._bin.mkdir()
        stubs = {"scontrol": _SCONTROL, "srun": _SRUN, "lighthouse-manager": _SUPERVISOR, "lighthouse": _LIGHTHOUSE}
        for name, text in stubs.items():
            (self._bin / name).write_text(text)
            (self._bin / name).chmod(0o755)

    @property
    def events(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    @contextmanager
    def job(self, *arguments: str, training: str = "ok", lighthouse: str = "ok") -> Iterator[subprocess.Popen[str]]:
        environment = {
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "alpha,beta",
            "SLURM_JOB_ID": "77",
            "RESTART_DELAY": "0.05",
            "MAX_RESTARTS": "2",
            "NPROC_PER_NODE": "8",
            "LOG": str(self._log),
            "TRAINING": training,
            "LIGHTHOUSE": lighthouse,
        }
        bash = shutil.which("bash") or "/bin/bash"
        with subprocess.Popen(
            [bash, str(SCRIPT), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                signal_group(process.pid, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Whether the process group has any member (number 0: only ask)."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
