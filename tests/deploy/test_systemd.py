"""The units, as systemd reads them."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.processes import LOCALHOST, Lighthouse, Process, eventually

from .tools import DEPLOY, STOP_S, missing, run, seconds, tool
from .training import Training

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DAEMONS = [unit for unit in UNITS if unit.name != "lighthouse-run@.service"]  # that one runs what the user trains
_INSTALLED = "/opt/lighthouse/bin/"


def with_executables(unit: Path, folder: Path) -> Path:
    """A copy of `unit` in `folder` whose ExecStart exists: verify asks for that."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name in ("lighthouse", "lighthouse-manager"):
        (bin_folder / name).write_text("#!/bin/sh\n")
        (bin_folder / name).chmod(0o755)
    copy = folder / unit.name
    copy.write_text(unit.read_text().replace(_INSTALLED, f"{bin_folder}/"))
    return copy


def verify(unit: Path) -> tuple[int, str]:
    result = run([tool("systemd-analyze"), "verify", "--man=no", unit])
    return result.returncode, result.stderr


def test_there_is_a_unit_for_each_daemon() -> None:
    assert [unit.name for unit in UNITS] == ["lighthouse-run@.service", "lighthouse.service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_no_fault(unit: Path, tmp_path: Path) -> None:
    assert verify(with_executables(unit, tmp_path)) == (0, "")


def test_verify_bites(tmp_path: Path) -> None:
    unit = with_executables(DEPLOY / "systemd" / "lighthouse.service", tmp_path)
    unit.write_text(unit.read_text().replace("RestartSec=", "RestarSec="))
    assert "Unknown key" in verify(unit)[1]


@pytest.mark.parametrize("unit", DAEMONS, ids=lambda unit: unit.name)
def test_little_is_exposed(unit: Path, tmp_path: Path) -> None:
    """systemd's own measure, 0 to 10, times ten; a unit without any sandbox has 9.6."""
    copy = tmp_path / unit.name.replace("@", "@group-0")
    copy.write_text(unit.read_text())
    result = run([tool("systemd-analyze"), "security", "--offline=yes", "--threshold=20", copy])
    assert result.returncode == 0, result.stdout


_BREAKS_TRAINING = {
    "DeviceAllow", "DevicePolicy", "MemoryDenyWriteExecute", "PrivateDevices", "PrivateIPC", "PrivateNetwork",
    "PrivateTmp", "ProtectClock", "ProtectHome", "RemoveIPC", "RestrictNamespaces", "SystemCallFilter",
}  # fmt: skip


def test_training_keeps_gpus_and_shared_memory_and_cannot_change_the_system(tmp_path: Path) -> None:
    (unit,) = set(UNITS) - set(DAEMONS)
    settings = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line and line[0] != "#")
    assert not _BREAKS_TRAINING & set(settings)
    assert (settings["NoNewPrivileges"], settings["ProtectSystem"]) == (
        "yes",
        "full",
    )  # strict: no file of a checkpoint
    copy = tmp_path / "lighthouse-run@group-0.service"
    copy.write_text(unit.read_text())
    result = run([tool("systemd-analyze"), "security", "--offline=yes", "--threshold=80", copy])
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_sigterm_drains_and_a_failure_restarts(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    (stop,) = (line.removeprefix("TimeoutStopSec=") for line in lines if line.startswith("TimeoutStopSec="))
    assert seconds(stop) >= STOP_S
    assert {"KillSignal=SIGTERM", "Restart=on-failure", "NoNewPrivileges=yes"} <= set(lines)
    assert ("DynamicUser=yes" in lines) == (unit in DAEMONS)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_daemon_that_hangs_is_started_again(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    assert {"Type=notify", "NotifyAccess=main", "Restart=on-failure"} <= set(lines)
    (watchdog,) = (line.removeprefix("WatchdogSec=") for line in lines if line.startswith("WatchdogSec="))
    assert seconds(watchdog) >= 30  # longer than any pause of a loaded host


_CONTROL_GROUPS = Path("/sys/fs/cgroup")

# systemd runs for a user only where it seems to have booted the machine; its control groups tell what it has started.
_SYSTEMD = """import os, pathlib, sys
for group in sys.argv[1:]:
    pathlib.Path(group).mkdir()
    pathlib.Path(group, "cgroup.procs").write_text(str(os.getpid()))
booted = "mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && exec /lib/systemd/systemd --user --unit="
os.execvp("unshare", ["unshare", "--mount", "sh", "-c", booted + "basic.target"])
"""


def is_ended(group: Path) -> bool:
    """Whether nothing runs in the control group any more, which is removed then."""
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            for pid in (Path(folder) / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            os.rmdir(folder)
    return not group.exists()


@contextmanager
def systemd(units: Path, folder: Path) -> Iterator[Callable[..., str]]:
    """A manager of `units`; its systemctl."""
    if os.geteuid() != 0:
        missing("control groups take root")
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder), "SYSTEMD_UNIT_PATH": f"{units}:"}
    named = [path for name in ("systemd", "unified") if (path := _CONTROL_GROUPS / name).is_dir()]
    groups = [path / f"lighthouse-test-{os.getpid()}" for path in named or [_CONTROL_GROUPS]]

    def systemctl(*words: str) -> str:
        result = run([tool("systemctl"), "--user", *words], env=environment)
        return result.stdout.strip() or result.stderr

    try:
        with Process(_SYSTEMD, [str(group) for group in groups], env=environment):
            eventually(lambda: systemctl("is-active", "basic.target") == "active", "systemd")
            yield systemctl
    finally:
        for group in groups:
            eventually(lambda group=group: is_ended(group), "the end of all that systemd has started")


def test_a_supervisor_comes_back_until_the_run_is_stopped(tmp_path: Path) -> None:
    places = {
        _INSTALLED: f"{Path(sys.executable).parent}/",
        "/etc/lighthouse/": f"{tmp_path}/",
        "/srv/training": str(tmp_path),
        "User=training": "",
    }
    text = (DEPLOY / "systemd" / "lighthouse-run@.service").read_text()
    text = re.sub("^Protect.*\n", "", text, flags=re.MULTILINE)  # a sandbox takes a system manager
    for there, here in places.items():
        text = text.replace(there, here)
    (tmp_path / "lighthouse-run@.service").write_text(text)
    shutil.copy(DEPLOY / "systemd" / "run.env", tmp_path)
    training = Training(tmp_path)
    with Lighthouse() as lighthouse, systemd(tmp_path, tmp_path) as systemctl:
        (tmp_path / "run-0.env").write_text(
            f"LIGHTHOUSE_ADDRESS={lighthouse.address}\nTRAINING_COMMAND={training.script}\n"
            f"LIGHTHOUSE_MANAGER_BIND={LOCALHOST}:0\nLIGHTHOUSE_MANAGER_STORE={LOCALHOST}:1\n"
        )
        unit = "lighthouse-run@0"
        systemctl("start", unit)
        training.survives("0")
        systemctl("stop", unit)
        assert systemctl("is-active", unit) == "inactive"
        systemctl("start", unit)
        training.started("0", "0100")
        training.tell("0", 130)
        eventually(lambda: systemctl("is-active", unit) == "failed", "the end of the unit")
        assert systemctl("show", unit, "--property=ExecMainStatus,NRestarts").split() == [
            "NRestarts=0",
            "ExecMainStatus=130",
        ]


def test_a_lighthouse_whose_loop_hangs_is_started_again(tmp_path: Path) -> None:
    """By the unit's own lines about that, with a shorter time; its sandbox takes a system manager."""
    kept = ("[", "Type=", "NotifyAccess=", "WatchdogSec=", "Restart=", "RestartSec=", "KillMode=")
    unit = (DEPLOY / "systemd" / "lighthouse.service").read_text()
    lines = [line for line in unit.splitlines() if line.startswith(kept)]
    text = re.sub("WatchdogSec=.*", "WatchdogSec=2s", "\n".join(lines))
    command = f"{Path(sys.executable).parent}/lighthouse serve --bind {LOCALHOST}:0 --http {LOCALHOST}:0 --journal none"
    (tmp_path / "hangs.service").write_text(text.replace("[Service]", f"[Service]\nExecStart={command}"))
    with systemd(tmp_path, tmp_path) as systemctl:

        def shown(name: str) -> str:
            return systemctl("show", "hangs", f"--property={name}", "--value")

        systemctl("start", "hangs")  # returns once it serves
        assert systemctl("is-active", "hangs") == "active"
        assert shown("StatusText") == "serving; no jobs"
        first = int(shown("MainPID"))
        os.kill(first, signal.SIGSTOP)
        eventually(lambda: shown("NRestarts") == "1" and systemctl("is-active", "hangs") == "active", "it is back")
        assert int(shown("MainPID")) != first
        systemctl("stop", "hangs")


def test_the_journal_lies_in_the_state_directory() -> None:
    text = (DEPLOY / "systemd" / "lighthouse.service").read_text()
    (folder,) = re.findall(r"^StateDirectory=(.*)$", text, re.MULTILINE)
    (journal,) = re.findall(r"^Environment=LIGHTHOUSE_JOURNAL=(.*)$", text, re.MULTILINE)
    assert journal.startswith(f"%S/{folder}/")
