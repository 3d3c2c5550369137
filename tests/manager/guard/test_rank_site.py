"""What runs in a rank's interpreter before its script. torch and agent_client are played: what matters is who is
imported when, and that the script never notices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK_SITE = Path(__file__).parents[3] / "manager/guard/rank_site"
TORCH = """
def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1):
    "makes it"
    return "made"
"""
OBSERVER = "def observe():\n    print('observed')\n"
SCRIPT = """
import inspect, sys
assert not {"torch", "agent_client"} & sys.modules.keys()
assert not any("rank_site" in entry for entry in sys.path)
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import init_process_group
assert "agent_client" not in sys.modules
assert type(c10d.__loader__) is type(c10d.__spec__.loader) is type(inspect.__loader__)
assert init_process_group.__doc__ == "makes it" and "rank" in inspect.signature(init_process_group).parameters
print(init_process_group(**eval(sys.argv[1])), getattr(sys.modules["sitecustomize"], "MINE", "none of mine"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for package in ("torch", "torch/distributed", "agent_client", "agent_client/step"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for name, text in {
        "torch/distributed/distributed_c10d.py": TORCH,
        "agent_client/step/observer.py": OBSERVER,
        "script.py": SCRIPT,
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, options: str = "{}") -> str:
    """What it writes."""
    env = {"PYTHONPATH": f"{RANK_SITE}{os.pathsep}{folder}", "RANK": "3"}
    command = [sys.executable, str(folder / "script.py"), options]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize("options", ["{}", "{'rank': 3}", "{'rank': -1}"])
def test_a_rank_is_observed_from_its_first_process_group_on(folder: Path, options: str):
    assert run(folder, options) == "observed\nmade none of mine\n"


def test_a_process_that_it_has_started_is_not(folder: Path):
    assert run(folder, "{'rank': 1}") == "made none of mine\n"


def test_a_defect_of_ours_never_reaches_the_script(folder: Path):
    (folder / "agent_client/step/observer.py").write_text("1 / 0")
    said = run(folder)
    assert "made none of mine\n" in said
    assert "WARNING: lighthouse does not see this rank's collectives: ZeroDiv" in said


def test_the_users_own_sitecustomize_is_imported(folder: Path):
    (folder / "sitecustomize.py").write_text("MINE = 'mine'")
    assert run(folder) == "observed\nmade mine\n"
