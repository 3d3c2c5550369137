"""`import agent_client`: light, and with every name that it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

import agent_client
from tests.processes import PATIENCE_S, ROOT, clean_environment, run_cli

# What a training script must not get by naming this package: torch before it wants it, and the generic names of ours.
NOT_IMPORTED = ("torch", "torchft", "numpy", "manager", "lighthouse")


def python(code: str, *paths: Path) -> "subprocess.CompletedProcess[str]":
    """Run with `paths` in front of everything but the standard library."""
    env = clean_environment(PYTHONPATH=":".join(map(str, paths)))
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "imports",
    [
        "import agent_client",
        "from agent_client import ManagerClient, LighthouseClient, AsyncManagerClient",
        "import agent_client.torchft",
    ],
)
def test_it_imports_no_torch_and_the_clients_come_without(imports: str) -> None:
    done = run_cli(f"import sys; {imports}; print([name for name in {NOT_IMPORTED!r} if name in sys.modules])")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_what_every_torchrun_loads_is_little() -> None:
    """Whatever its backend, torchrun loads the entry point."""
    heavy = (*NOT_IMPORTED, "grpc", "google.protobuf")
    code = f"import sys, agent_client.torchrun.entry; print([name for name in {heavy!r} if name in sys.modules])"
    done = run_cli(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("name", agent_client.__all__)
def test_every_promised_name_is_there(name: str) -> None:
    assert getattr(agent_client, name).__name__ == name


def test_every_lazy_name_is_promised() -> None:
    assert set(agent_client._MODULE_OF) <= set(agent_client.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_both() -> None:
    with pytest.raises(AttributeError, match=r"^module 'agent_client' has no attribute 'Agnet'$"):
        _ = agent_client.Agnet  # type: ignore[attr-defined]


def test_naming_the_agent_loads_torch_and_nothing_generic(tmp_path: Path) -> None:
    for name in ("manager", "lighthouse", "protos"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported what is not ours')\n")
    code = "import sys; from agent_client import Agent; print(Agent.__module__, 'torch' in sys.modules)"
    done = python(code, tmp_path, ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "agent_client.step.agent True\n", "")
