"""compose.yaml, as docker compose reads it (`config` needs no engine)."""

import json
from pathlib import Path
from typing import Any

from .test_dockerfile import instructions
from .tools import DEPLOY, STOP_S, run, seconds, tool

COMPOSE = DEPLOY / "compose" / "compose.yaml"


def services() -> dict[str, Any]:
    result = run([tool("docker-compose"), "-f", COMPOSE, "config", "--format", "json"])
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)["services"]


def test_one_lighthouse_and_two_managers() -> None:
    assert list(services()) == ["lighthouse", "manager-0", "manager-1"]


def test_managers_differ_where_they_must() -> None:
    managers = [service["environment"] for name, service in services().items() if name != "lighthouse"]
    for own in ("LIGHTHOUSE_MANAGER_REPLICA_ID", "LIGHTHOUSE_MANAGER_ADVERTISE"):
        assert len({environment[own] for environment in managers}) == 2


def test_every_service_drains_and_managers_wait_for_a_healthy_lighthouse() -> None:
    for name, service in services().items():
        assert seconds(service["stop_grace_period"]) >= STOP_S
        if name != "lighthouse":
            assert service["depends_on"]["lighthouse"]["condition"] == "service_healthy"
            assert service["environment"]["LIGHTHOUSE_MANAGER_HTTP"] == "[::]:29511", (
                "the image's health check asks there"
            )


def test_the_journal_is_in_a_volume() -> None:
    (volume,) = services()["lighthouse"]["volumes"]
    (journal,) = (line.partition("=")[2] for line in instructions("runtime") if "LIGHTHOUSE_JOURNAL=" in line)
    assert (volume["type"], volume["target"]) == ("volume", str(Path(journal).parent))


def test_the_check_bites() -> None:
    result = run([tool("docker-compose"), "-f", "-", "config", "-q"], input="services: {a: {image: b, helthcheck: {}}}")
    assert result.returncode != 0
    assert "helthcheck" in result.stderr
