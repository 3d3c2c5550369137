"""python -m agent_client.torchft: a script, or a module, that knows nothing of us."""

from pathlib import Path

import pytest

from tests.agent_client.ranks import Rank, RankError
from tests.processes import run_cli

# What it sees; it imports a module beside it, as scripts do.
SCRIPT = """
import json, sys
import beside_the_script
from torchft.manager import ManagerServer
assert __name__ == "__main__"
with open(sys.argv[1], "w") as file:
    json.dump([ManagerServer.__module__, sys.argv[2:], beside_the_script.NAME], file)
"""
# It trains without torchft, and tells how far it came.
ALONE = """
import sys, torch
weight = torch.nn.Parameter(torch.zeros(()))
sgd = torch.optim.SGD([weight], lr=1.0)
(weight - 1).square().backward()
try:
    sgd.step()
finally:
    with open(sys.argv[1], "w") as file:
        file.write(str(weight.item()))
"""
SEEN = '["agent_client.torchft.servers", ["--steps", "3"], "beside"]'


@pytest.fixture(autouse=True)
def _written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside_the_script.py").write_text("NAME = 'beside'")


def run(script: Rank, folder: Path, *arguments: str) -> None:
    script.call(
        "run",
        "import os, sys",
        f"os.chdir({str(folder)!r})",
        f"sys.path.insert(0, {str(folder)!r})",
        f"sys.argv = {['agent_client.torchft', *arguments]!r}",
        "from agent_client.torchft.__main__ import main",
        "main()",
    )


@pytest.mark.parametrize("program", [("train.py",), ("-m", "train")], ids=["script", "module"])
def test_it_runs_on_ours_with_its_own_arguments(script: Rank, tmp_path: Path, program: tuple[str, ...]) -> None:
    run(script, tmp_path, *program, "seen", "--steps", "3")
    assert (tmp_path / "seen").read_text() == SEEN


def test_what_the_script_raises_is_raised(script: Rank, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    with pytest.raises(RankError, match="^SystemExit: 7"):
        run(script, tmp_path, "train.py")


@pytest.mark.parametrize("program", [("train.py",), ("-m", "train")], ids=["script", "module"])
def test_a_script_that_would_train_without_torchft_is_ended_before_its_first_step(
    script: Rank, tmp_path: Path, program: tuple[str, ...]
) -> None:
    """As torchtitan.train does since 0.2.2, whatever its options say."""
    (tmp_path / "train.py").write_text(ALONE)
    with pytest.raises(RankError, match="^SystemExit: .*has made no torchft Manager.*integrations.torchtitan"):
        run(script, tmp_path, *program, "seen")
    assert (tmp_path / "seen").read_text() == "0.0"


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-m",)])
def test_without_a_script_it_says_how(arguments: tuple[str, ...]) -> None:
    code = f"import sys; sys.argv[1:] = {arguments!r}; from agent_client.torchft.__main__ import main; main()"
    done = run_cli(code)
    assert done.returncode == 1
    assert done.stderr == "usage: python -m agent_client.torchft [-m MODULE | SCRIPT] ARGUMENTS...\n"
