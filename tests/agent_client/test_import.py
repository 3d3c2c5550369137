"""`import agent_client`: light, sure of its own `protos`, and with every name that it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

import agent_client
from tests.processes import PATIENCE_S, ROOT, clean_environment, run_cli

# What a training script must not get by naming this package: torch before it wants it, and the generic names of ours.
NOT_IMPORTED = ("torch", "numpy", "manager", "lighthouse")


def python(code: str, *paths: Path) -> "subprocess.CompletedProcess[str]":
    """Run with `paths` in front of everything but the standard library."""
    env = clean_environment(PYTHONPATH=":".join(map(str, paths)))
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def test_it_imports_no_torch() -> None:
    code = f"import sys, agent_client; print([name for name in {NOT_IMPORTED!r} if name in sys.modules])"
    done = run_cli(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_the_clients_come_without_torch() -> None:
    done = run_cli(
        "import sys; from agent_client import ManagerClient, LighthouseClient, AsyncManagerClient; "
        "print('torch' in sys.modules)"
    )
    assert (done.returncode, done.stdout) == (0, "False\n")


@pytest.mark.parametrize("name", agent_client.__all__)
def test_every_promised_name_is_there(name: str) -> None:
    assert getattr(agent_client, name).__name__ == name


def test_every_lazy_name_is_promised() -> None:
    assert set(agent_client._WHEN_NAMED) <= set(agent_client.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_both() -> None:
    with pytest.raises(AttributeError, match=r"^module 'agent_client' has no attribute 'Agnet'$"):
        _ = agent_client.Agnet  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("file", "content"),
    [("protos/__init__.py", ""), ("protos.py", ""), ("protos/__init__.py", "LIGHTHOUSE_FT = 'another'\n")],
    ids=["package", "module", "marked differently"],
)
def test_a_foreign_protos_in_front_is_an_error_that_names_its_file(tmp_path: Path, file: str, content: str) -> None:
    foreign = tmp_path / file
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text(content)
    done = python("import agent_client", tmp_path, ROOT)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: agent_client needs lighthouse-ft's own package `protos`, but ")
    assert str(foreign) in last
    assert "rename" in last


def test_a_foreign_folder_without_code_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """A namespace package gives way to ours, wherever it stands."""
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "training.proto").write_text("")
    done = python("import agent_client", tmp_path, ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_naming_the_agent_loads_torch_and_nothing_generic(tmp_path: Path) -> None:
    for name in ("manager", "lighthouse"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported what is not ours')\n")
    code = "import sys; from agent_client import Agent; print(Agent.__module__, 'torch' in sys.modules)"
    done = python(code, tmp_path, ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "agent_client.agent True\n", "")
