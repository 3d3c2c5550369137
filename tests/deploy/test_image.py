"""The images are built and their daemons run, as their user."""

import json
import os
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from .image_builder import Container, ImageBuilder, image_builder
from .tools import DEPLOY, REPOSITORY, missing, yaml_documents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500, method="signal")]

# Starts the daemons it is told, asks the health check until it passes, sends SIGTERM, and shows the exit statuses.
_RUN_DAEMONS = """
import json, os, subprocess, sys, time

told = json.load(sys.stdin)
daemons = [subprocess.Popen(each["command"], env={**os.environ, **each["environment"]}) for each in told["daemons"]]

def is_healthy():
    return subprocess.run(told["check"], stderr=subprocess.DEVNULL).returncode == 0

ends_at = time.monotonic() + 90
while not (passed := is_healthy()) and time.monotonic() < ends_at and all(each.poll() is None for each in daemons):
    time.sleep(0.2)
for each in reversed(daemons):
    each.terminate()
print(json.dumps({"passed": passed, "statuses": [each.wait(60) for each in daemons]}))
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageBuilder]:
    default = re.search(r"^ARG PYTHON_IMAGE=python:3\.11-slim-(\w+)$", (REPOSITORY / "Dockerfile").read_text(), re.M)
    assert default is not None
    own = tmp_path_factory.getbasetemp()
    of_all_workers = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with image_builder(of_all_workers / "debian.tar") as builder:
        builder.make_base(suite=default[1])
        yield builder


@pytest.fixture(scope="module")
def daemons(builder: ImageBuilder) -> Container:
    return builder.container(builder.build("daemons", {}))


@pytest.fixture(scope="module")
def torch(builder: ImageBuilder) -> Container:
    """With the very torch that this environment has, from where pip finds it here."""
    try:
        wanted = version("torch")
    except PackageNotFoundError:
        missing("torch is not installed, so its version is not known: pip install torch")
    image = builder.build("torch", {"TORCH_INDEX_URL": "", "TORCH_REQUIREMENT": f"torch=={wanted}"})
    return builder.container(image)


def health_check(container: Container) -> list[str]:
    kind, *command = container.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    return command


def run_daemons(container: Container, daemons: list[dict[str, Any]], check: list[str]) -> dict[str, Any]:
    result = container.run("python", "-c", _RUN_DAEMONS, input=json.dumps({"daemons": daemons, "check": check}))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_both_programs_run_as_the_user(daemons: Container) -> None:
    assert daemons.run("id", "-u").stdout == "65532\n"
    for program in ("lighthouse", "lighthouse-manager"):
        result = daemons.run(program, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert "serve" in result.stdout


def test_the_small_image_is_small(daemons: Container) -> None:
    assert daemons.run("python", "-c", "import torch").returncode != 0
    assert daemons.run("sh", "-c", "ls -d /src /build /wheels").stdout == ""
    size_kib = int(daemons.run("du", "-sk", "/opt/lighthouse").stdout.split()[0])
    assert size_kib < 150 * 1024


def test_the_user_cannot_change_the_programs(daemons: Container) -> None:
    assert daemons.run("sh", "-c", "touch /opt/lighthouse/bin/x || touch /usr/local/bin/x").returncode != 0


def test_the_default_command_becomes_healthy_and_drains(daemons: Container) -> None:
    assert not daemons.config.get("Entrypoint")
    assert set(daemons.config["ExposedPorts"]) == {"29510/tcp", "29511/tcp"}
    check = health_check(daemons)
    assert daemons.run(*check).returncode != 0
    outcome = run_daemons(daemons, [{"command": daemons.config["Cmd"], "environment": {}}], check)
    assert outcome == {"passed": True, "statuses": [0]}


def test_a_manager_with_its_own_store_runs_in_the_torch_image(torch: Container) -> None:
    (compose,) = yaml_documents((DEPLOY / "compose" / "compose.yaml").read_text())
    manager = compose["services"]["manager-0"]
    environment = {
        **manager["environment"],
        "LIGHTHOUSE_ADDRESS": "127.0.0.1:29510",
        "LIGHTHOUSE_MANAGER_ADVERTISE": "127.0.0.1",
        "LIGHTHOUSE_MANAGER_GROUP_WORLD_SIZE": "1",
    }
    told = [
        {"command": ["lighthouse", "serve", "--http", "127.0.0.1:0"], "environment": {}},
        {"command": manager["command"], "environment": environment},
    ]
    assert run_daemons(torch, told, health_check(torch)) == {"passed": True, "statuses": [0, 0]}
