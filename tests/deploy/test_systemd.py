"""The units, as systemd reads them."""

import re
from pathlib import Path

import pytest

from .tools import DEPLOY, STOP_S, run, seconds, tool

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
    assert [unit.name for unit in UNITS] == [
        "lighthouse-manager@.service",
        "lighthouse-run@.service",
        "lighthouse.service",
    ]


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


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_sigterm_drains_and_a_failure_restarts(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    (stop,) = (line.removeprefix("TimeoutStopSec=") for line in lines if line.startswith("TimeoutStopSec="))
    assert seconds(stop) >= STOP_S
    assert {"KillSignal=SIGTERM", "Restart=on-failure", "NoNewPrivileges=yes"} <= set(lines)
    assert ("DynamicUser=yes" in lines) == (unit in DAEMONS)


def test_a_run_that_was_stopped_is_not_started_again() -> None:
    lines = (DEPLOY / "systemd" / "lighthouse-run@.service").read_text().splitlines()
    assert {"RestartPreventExitStatus=130", "SuccessExitStatus=143"} <= set(lines)


def test_the_journal_lies_in_the_state_directory() -> None:
    text = (DEPLOY / "systemd" / "lighthouse.service").read_text()
    (folder,) = re.findall(r"^StateDirectory=(.*)$", text, re.MULTILINE)
    (journal,) = re.findall(r"^Environment=LIGHTHOUSE_JOURNAL=(.*)$", text, re.MULTILINE)
    assert journal.startswith(f"%S/{folder}/")
