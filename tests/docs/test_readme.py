"""README.md: its versions are declared, and its commands and its script run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.ports import free_port
from tests.docs.pages import REPOSITORY
from tests.processes import PATIENCE_S, clean_environment, eventually

README = (REPOSITORY / "README.md").read_text()
EXAMPLE = (REPOSITORY / "examples/train_ddp.py").read_text()
PROJECT = (REPOSITORY / "pyproject.toml").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
[SCRIPT] = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1000


def test_every_block_is_one_of_those_that_are_run_here() -> None:
    first_words = [[line.split()[:2] for line in block.splitlines()] for block in BLOCKS]
    assert first_words == [
        [["make", "demo"], ["make", "test"]],
        [["pip", "install"]],
        [["lighthouse", "serve"], ["lighthouse", "token"]],
        [["export", "LIGHTHOUSE_ADDRESS='lighthouse://...'"], ["lighthouse-manager", "run"]],
    ]


def test_ci_runs_the_make_targets() -> None:
    if not (ci := REPOSITORY / ".ci" / "run").exists():
        pytest.skip("an sdist has no .ci")
    for target in re.findall(r"^make (\w+)", BLOCKS[0], re.MULTILINE):
        assert re.search(rf"^make {target}\b", ci.read_text(), re.MULTILINE), target


def test_pip_takes_the_install_line() -> None:
    pytest.importorskip("hatchling")
    [command] = BLOCKS[1].splitlines()
    assert command == 'pip install ".[torch]"'
    offline = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, ".[torch]"], cwd=REPOSITORY, check=True)


def test_versions_are_those_of_the_project() -> None:
    [python] = re.findall(r'^requires-python = ">=(.+)"', PROJECT, re.MULTILINE)
    [torch] = re.findall(r'^torch = \["torch>=([\d.]+)"', PROJECT, re.MULTILINE)
    assert re.findall(r"Python (\d\.\d+) or newer", README) == [python, python]
    assert re.findall(r"PyTorch (\d\.\d+) or newer", README) == [torch]
    [tested] = re.findall(r"^TORCH \?= torch==(\S+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    [passes] = re.findall(r"`make test` passes with\s+PyTorch ([\d., and]+\d)", README)
    assert tested in re.split(", | and ", passes)


def test_the_script_is_the_example() -> None:
    for line in SCRIPT.splitlines():
        code = line.partition("  #")[0].strip()
        if code.startswith(("agent", "replicated", "optimizer")):
            assert code in EXAMPLE, code


PRELUDE = """
import torch
from torch import nn

images, labels = torch.randn(64, 8), torch.arange(64) % 4
model = nn.Linear(8, 4)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
loss, steps, batch_size = nn.functional.cross_entropy, 3, 8
"""


@pytest.mark.slow
def test_the_commands_of_two_machines_train_the_script(tmp_path: Path) -> None:
    """With other ports, and with one rank for eight."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(f"{PRELUDE}{SCRIPT}print('trained', agent.current_step)\n")
    port = free_port()
    env = clean_environment(
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        XDG_STATE_HOME=str(tmp_path / "state"),
        LIGHTHOUSE_BIND=f"[::]:{port}",
        LIGHTHOUSE_HTTP="127.0.0.1:0",
        LIGHTHOUSE_MANAGER_BIND="[::]:0",
        LIGHTHOUSE_MANAGER_MASTER_PORT=str(free_port()),
        LIGHTHOUSE_MANAGER_STORE_PORT=str(free_port()),
    )
    serve, token = BLOCKS[2].splitlines()
    with (tmp_path / "lighthouse.log").open("w") as log:
        lighthouse = subprocess.Popen(["sh", "-c", f"exec {serve}"], env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        eventually(lambda: "serves gRPC" in (tmp_path / "lighthouse.log").read_text(), "the lighthouse serves")
        joined = shell(f"{token} --port {port} --host localhost", env, tmp_path).split()[-1]
        host = BLOCKS[3].replace("lighthouse://...", joined).replace("--nproc-per-node 8", "--nproc-per-node 1")
        assert joined in host
        assert "trained 3" in shell(host, env, tmp_path)
    finally:
        lighthouse.terminate()
        lighthouse.wait(PATIENCE_S)


def shell(commands: str, env: dict[str, str], folder: Path) -> str:
    """What they print; the last one must end with 0."""
    done = subprocess.run(
        ["sh", "-c", commands], env=env, cwd=folder, text=True, timeout=PATIENCE_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
