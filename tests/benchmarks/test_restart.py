"""The benchmark of a supervised group's restart runs, and its numbers can be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY


@pytest.mark.slow
def test_restart(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.restart", "--quick", "--json", str(path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert len(report["restarts"]) == 2
    assert all(0 < restart["from_start_s"] < restart["whole_s"] for restart in report["restarts"])
