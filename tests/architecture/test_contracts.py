"""The contracts of the wings bite: what breaks one of them makes `lint-imports` red, and says which."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.test_imports import PACKAGES
from tests.docs.pages import REPOSITORY

LINT = Path(sys.executable).with_name("lint-imports")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([LINT, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_copy_is_as_clean_as_the_original(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout


PURE = "Rules, messages and aggregates are pure"
DRIVERS = "Every module named driver is free of loop and transport"


@pytest.mark.parametrize(
    ("file", "planted", "broken"),
    [
        ("lighthouse/job/lineage.py", "import asyncio", PURE),
        ("manager/group/votes.py", "import logging", PURE),
        ("lighthouse_protocol/messages/membership.py", "import google.protobuf", PURE),
        ("agent_client/healing/rules/catch_up.py", "import torch", PURE),
        ("lighthouse/job/run_driver.py", "import time", DRIVERS),
        ("lighthouse/job/roster.py", "import lighthouse.store.sqlite", "Wings of lighthouse"),
        ("manager/group/driver.py", "import manager.server.daemon", "Wings of manager"),
        ("agent_client/state/tree.py", "import agent_client.step.agent", "Wings of agent_client"),
        ("lighthouse_runtime/net/outbox.py", "import lighthouse_runtime.web.server", "Wings of lighthouse_runtime"),
        ("lighthouse_protocol/messages/run.py", "import lighthouse_protocol.wire.codec", "Wings of lighthouse_proto"),
        ("lighthouse/server/daemon.py", "import manager.group.driver", "Floors"),
        ("lighthouse/job/__init__.py", "import torch", "No daemon imports torch"),
        ("manager/guard/guard.py", "import google.protobuf", "Only lighthouse_protocol.wire knows protobuf"),
        ("lighthouse/cellar/__init__.py", "", "Wings of lighthouse"),
        ("manager/cellar.py", "", "Wings of manager"),
    ],
    ids=lambda value: str(value).replace("/", ".") if str(value).endswith(".py") else None,
)
def test_what_breaks_a_contract_is_found(copy: Path, file: str, planted: str, broken: str) -> None:
    path = copy / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{path.read_text() if path.exists() else ''}\n{planted}\n")
    done = lint(copy)
    assert done.returncode == 1
    assert f"{broken}" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith(broken) and "BROKEN" in line], done.stdout


def test_no_contract_lists_modules_by_hand() -> None:
    """A rule is pure because of its folder: a new one needs no line anywhere."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = [name for contract in contracts for name in contract.get("source_modules", [])]
    assert [name for name in named if "." in name.replace("*.", "").removesuffix(".*")] == []
