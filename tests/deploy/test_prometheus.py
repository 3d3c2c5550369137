"""The alerts, as promtool reads and tests them; they name real metrics, and sections of the runbook."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lighthouse_protocol.messages.membership import Participant
from lighthouse_runtime.client.clients import LighthouseClient
from tests.processes import PATIENCE_S, Lighthouse, http_get

from .tools import DEPLOY, REPOSITORY, run, tool, yaml_documents

PROMETHEUS = DEPLOY / "prometheus"
ALERTS = PROMETHEUS / "alerts.yaml"
NOT_OURS = {"up"}
SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "info": ("_info",)}


def rules() -> list[dict[str, Any]]:
    (document,) = yaml_documents(ALERTS.read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def metrics_in(expression: str) -> set[str]:
    """The names of metrics that an expression selects."""
    return {name for name in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b|\bup\b", expression) if _is_metric(name)}


def _is_metric(name: str) -> bool:
    return name == "up" or name.startswith("lighthouse_")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """The names of all samples that a real lighthouse exports, or could."""
    with Lighthouse() as lighthouse, LighthouseClient(lighthouse.address) as client:
        client.quorum(Participant("a", step=3), timeout_s=PATIENCE_S)
        families = list(text_string_to_metric_families(http_get(lighthouse.http + "/metrics")[1]))
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "lighthouse.json").read_text())


def panel_expressions() -> list[tuple[str, str]]:
    """(title of the panel, expression)."""
    return [(panel["title"], target["expr"]) for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def headings() -> Iterator[str]:
    for line in (REPOSITORY / "docs/how-to/runbook.md").read_text().splitlines():
        if line.startswith("## "):
            yield line.removeprefix("## ")


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    result = run([tool("promtool"), "check", "config", PROMETHEUS / "prometheus.yaml"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"SUCCESS: {len(rules())} rules found" in result.stdout


def test_each_alert_fires_when_it_is_meant_to_and_not_else() -> None:
    result = run([tool("promtool"), "test", "rules", PROMETHEUS / "alerts.test.yaml"])
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_is_tested() -> None:
    tested = (PROMETHEUS / "alerts.test.yaml").read_text()
    healthy, _, firing = tested.partition("- name: it is down")
    for rule in rules():
        assert f"alertname: {rule['alert']}}}" in healthy, "not shown to be silent"
        assert re.search(rf'alertname[=:] ?"?{rule["alert"]}\b', firing), f"{rule['alert']} is not shown to fire"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_names_metrics_that_the_lighthouse_exports(rule: dict[str, Any], exported: set[str]) -> None:
    named = metrics_in(rule["expr"])
    assert named
    assert named - exported - NOT_OURS == set()


def test_a_panel_names_metrics_that_the_lighthouse_exports(exported: set[str]) -> None:
    assert len(panel_expressions()) > 20
    for title, expression in panel_expressions():
        named = metrics_in(expression)
        assert named, title
        assert named - exported == set(), title


def test_promtool_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    records = [
        {"record": f"panel:{number}", "expr": expression.replace("$job", ".*")}
        for number, (_, expression) in enumerate(panel_expressions())
    ]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": records}]}))
    result = run([tool("promtool"), "check", "rules", tmp_path / "rules.yaml"])
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_panels_of_the_dashboard_lie_side_by_side() -> None:
    """In a grid 24 wide: none over another, each with a title, an id of its own, and the data source that is chosen."""
    panels = dashboard()["panels"]
    taken = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels if panel["title"]})
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels if panel["type"] != "row")


def test_each_alert_has_its_section_of_the_runbook_and_each_section_its_alert() -> None:
    names = [rule["alert"] for rule in rules()]
    assert [heading for heading in headings() if heading.startswith("Lighthouse")] == names
    for rule in rules():
        section = f"/how-to/runbook/#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == "{{ $externalLabels.lighthouse_docs }}" + section
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description"} < rule["annotations"].keys()


def test_a_pager_can_open_the_link_to_the_runbook() -> None:
    (document,) = yaml_documents((PROMETHEUS / "prometheus.yaml").read_text())
    assert urlsplit(document["global"]["external_labels"]["lighthouse_docs"]).scheme == "https"


def test_a_metric_that_is_not_there_is_found(exported: set[str]) -> None:
    assert metrics_in('sum by (job) (rate(lighthouse_no_such_total{a="b"}[5m])) > 0') == {"lighthouse_no_such_total"}
    assert "lighthouse_no_such_total" not in exported
