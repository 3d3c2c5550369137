"""Dockerfile and .dockerignore, as hadolint and a reader see them."""

import tomllib

from .tools import REPOSITORY, run, tool

DOCKERFILE = REPOSITORY / "Dockerfile"


def instructions(stage: str) -> list[str]:
    """The instructions of one stage, continued lines joined."""
    found: list[str] = []
    current = ""
    for line in DOCKERFILE.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("FROM "):
            current = line.split(" AS ")[-1]
        elif current == stage and line and not line.startswith("#"):
            found.append(" ".join(line.split()))
    return found


def test_hadolint_has_nothing_to_say() -> None:
    result = run([tool("hadolint"), "--no-color", DOCKERFILE])
    assert (result.returncode, result.stdout) == (0, "")


def test_hadolint_bites() -> None:
    result = run([tool("hadolint"), "-"], input="FROM python\nRUN cd /tmp && apt-get install curl\n")
    assert result.returncode == 1
    assert "DL3006" in result.stdout


def test_the_last_stage_is_the_small_one() -> None:
    stages = [line.split(" AS ")[-1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("FROM ")]
    assert stages[-1] == "daemons"
    assert "torch" in stages


def test_it_runs_as_a_numeric_user_that_is_not_root() -> None:
    users = [line.removeprefix("USER ") for line in instructions("runtime") if line.startswith("USER ")]
    assert users == ["65532:65532"]


def test_the_build_context_is_what_the_wheel_is_made_of() -> None:
    hatch = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert "*" in lines
    assert kept == {*hatch["packages"], "pyproject.toml", "README.md", "LICENSE"}
