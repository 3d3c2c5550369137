"""A project with its own `protos`, `manager` and `lighthouse`, in its own folder and with PYTHONPATH=.: both work.

So does our wheel beside another distribution's `protos`.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lighthouse_runtime.process.commands import START_MANAGER
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, clean_environment, serving

REPOSITORY = Path(__file__).parents[2]
OURS = {"lighthouse", "manager", "agent_client", "lighthouse_protocol", "lighthouse_runtime"}

REGISTERED = """
from google.protobuf import descriptor_pb2, descriptor_pool

for name in ("manager.proto", "protos/manager.proto", "lighthouse.proto"):
    file = descriptor_pb2.FileDescriptorProto(name=name, package="mine." + name.replace("/", "_").partition(".")[0])
    file.message_type.add(name="Manager")
    descriptor_pool.Default().Add(file)
"""
TRAIN = """
import lighthouse
import manager
import protos.manager_pb2

import torch
from agent_client import Agent, DistributedDataParallel, FaultTolerantOptimizer, TrainState

model = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
agent = Agent.from_env(state=TrainState(model, sgd))
replicated, optimizer = DistributedDataParallel(model, agent), FaultTolerantOptimizer(sgd, agent)
while agent.current_step < 2:
    optimizer.zero_grad()
    replicated(torch.ones(3, 2)).sum().backward()
    optimizer.step()
agent.close()
assert lighthouse.WHOSE == manager.WHOSE == "the user's", (lighthouse, manager)
print("trained", agent.current_step, "beside", manager.WHOSE)
"""
FILES = {
    "protos/__init__.py": "",
    "protos/manager_pb2.py": REGISTERED,
    "protos/manager.proto": 'syntax = "proto3"; package mine;',
    "manager/__init__.py": 'WHOSE = "the user\'s"\n',
    "lighthouse.py": 'WHOSE = "the user\'s"\n',
    "train.py": TRAIN,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(project: Path, *command: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=project,
        env=clean_environment(**{"PYTHONPATH": "."} | env),
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_its_script_trains_with_its_own_modules(project: Path, lighthouse: Lighthouse) -> None:
    pytest.importorskip("torch")
    named = {"LIGHTHOUSE_ADDRESS": lighthouse.address, "REPLICA_GROUP_ID": "a"}
    said = run(project, "train.py", **named)
    assert "trained 2 beside the user's" in said


def test_its_ranks_may_be_supervised(project: Path, lighthouse: Lighthouse) -> None:
    words = ("run", "--lighthouse", lighthouse.address, "--replica-id", "a", "--bind", f"{LOCALHOST}:0")
    rank = "import manager, lighthouse, protos.manager_pb2; print('a rank beside', manager.WHOSE)"
    options = ("--advertise", LOCALHOST, "--store", f"{LOCALHOST}:1", "--", sys.executable, "-c", rank)
    said = run(project, "-c", START_MANAGER, *words, *options)
    assert "a rank beside the user's" in said
    assert "all ranks are done" in said


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a wheel of this repository was installed, and then one of a distribution named protos."""
    pytest.importorskip("hatchling")
    built, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(built), str(REPOSITORY))
    pip("install", "--target", str(folder), *map(str, built.glob("lighthouse_ft-*.whl")))
    assert {name for name in os.listdir(folder) if ".dist-info" not in name} == {*OURS, "bin"}
    pip("install", "--target", str(folder), str(protos_wheel(built)))
    return folder


def pip(verb: str, *words: str) -> None:
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--no-index", "--no-deps", *words]
    subprocess.run(command, check=True, env=clean_environment(), timeout=4 * PATIENCE_S)


def protos_wheel(folder: Path) -> Path:
    path, about = folder / "protos-1.0-py3-none-any.whl", "protos-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("protos/__init__.py", 'WHOSE = "another distribution\'s"\n')
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: protos\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path


@pytest.mark.slow
def test_what_is_installed_has_no_name_that_another_distribution_has(installed: Path) -> None:
    """`pip install protos` after ours changes nothing of ours, nor do we change that."""
    code = "import protos, lighthouse_runtime as ours, agent_client; print(protos.WHOSE, ours.__file__)"
    assert f"another distribution's {installed}/lighthouse_runtime" in run(installed, "-c", code)


@pytest.mark.slow
def test_an_installed_command_starts_in_its_folder(project: Path, installed: Path) -> None:
    command, path = str(installed / "bin" / "torchft_lighthouse"), f".{os.pathsep}{installed}"
    with serving(command, folder=project, PYTHONPATH=path) as address:
        status = (str(installed / "bin" / "lighthouse"), "status", "--lighthouse", address)
        assert "no job" in run(project, *status, PYTHONPATH=path).lower()
