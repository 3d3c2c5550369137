"""torchft's own integration tests, as its wheel brings them, on our lighthouse and managers."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, clean_environment
from tests.torchft.stock import require

# One asks that a call of 10 ms is back within a second: that is about the machine.
ABOUT_THE_MACHINE = "test_quorum_timeout"
NEEDED = ("parameterized", "expecttest")


def require_their_tools() -> None:
    require()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"torchft's tests need {missing}", pytrace=False)
    if missing:
        pytest.skip(f"torchft's tests need {missing}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("module", "least"), [("manager_integ_test", 6), ("local_sgd_integ_test", 20)])
def test_they_pass(module: str, least: int, tmp_path: Path) -> None:
    require_their_tools()
    ours = ["-p", "tests.agent_client.torchft.their_own", "-p", "no:cacheprovider", "-k", f"not {ABOUT_THE_MACHINE}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, *ours, "--pyargs", f"torchft.{module}"],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-2000:]
