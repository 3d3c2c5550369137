"""compose.yaml, as docker compose reads it (`config` needs no engine)."""

import json
from pathlib import Path
from typing import Any

from .test_dockerfile import instructions
from .tools import DEPLOY, STOP_S, run, seconds, tool

COMPOSE = DEPLOY / "compose" / "compose.yaml"


def services(*options: str) -> dict[str, Any]:
    result = run([tool("docker-compose"), "-f", COMPOSE, *options, "config", "--format", "json"])
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
    variables = [word for line in instructions("runtime") if line.startswith("ENV ") for word in line.split()[1:]]
    environment = dict(variable.split("=", 1) for variable in variables)
    assert volume["type"] == "volume"
    assert volume["target"] == str(Path(environment["LIGHTHOUSE_JOURNAL"]).parent)
    credentials = Path(environment["XDG_STATE_HOME"], "lighthouse")
    assert credentials.is_relative_to(volume["target"]), "credentials outlive the container as the journal does"


def test_monitoring_is_a_profile_and_shows_the_files_of_this_folder() -> None:
    added = {name: each for name, each in services("--profile", "monitoring").items() if name not in services()}
    assert list(added) == ["grafana", "prometheus"]
    mounted = {volume["target"]: Path(volume["source"]) for each in added.values() for volume in each["volumes"]}
    assert (mounted["/etc/prometheus"] / "alerts.yaml").is_file()
    assert (mounted["/etc/grafana/provisioning"] / "dashboards" / "lighthouse.yaml").is_file()
    assert mounted["/etc/grafana/dashboards/lighthouse.json"].is_file()
    for each in added.values():
        assert all(port["host_ip"] == "127.0.0.1" for port in each["ports"])


def test_the_check_bites() -> None:
    result = run([tool("docker-compose"), "-f", "-", "config", "-q"], input="services: {a: {image: b, helthcheck: {}}}")
    assert result.returncode != 0
    assert "helthcheck" in result.stderr
