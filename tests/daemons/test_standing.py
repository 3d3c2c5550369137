"""What a standing quorum looks like from outside, while its groups train without asking the lighthouse."""

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemons.groups import Group, training
from tests.processes import LIGHTHOUSE_CODE, MANAGER_CODE, Lighthouse, http_get, run_cli


@pytest.fixture(scope="module")
def groups(lighthouse: Lighthouse) -> Iterator[tuple[Group, ...]]:
    with training(lighthouse, "default", "ab") as groups:
        yield groups


def scrape(url: str) -> dict[tuple[str, str], float]:
    """(name, the label that is not the job) to value."""
    families = text_string_to_metric_families(http_get(url + "/metrics")[1])
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, "".join(v for k, v in s.labels.items() if k != "job")): s.value for s in samples}


def test_the_manager_says_how_it_holds_it(groups: tuple[Group, ...]) -> None:
    manager = groups[0].manager
    said = json.loads(run_cli(MANAGER_CODE, "status", "--manager", manager.address, "--format", "json").stdout)
    assert (said["mode"], said["quorum_id"]) == ("standing", groups[0].commits[-1][1])
    assert said["step"] >= said["grants"] > 0
    text = run_cli(MANAGER_CODE, "status", "--manager", manager.address).stdout
    assert re.search(r"held: standing, .* steps granted without asking the lighthouse", text)
    seen = scrape(manager.http)
    assert [seen["lighthouse_manager_mode", mode] for mode in ("standing", "revoked", "none")] == [1, 0, 0]
    assert seen["lighthouse_manager_grants_total", ""] > 0


def test_the_lighthouse_shows_the_phase(lighthouse: Lighthouse, groups: tuple[Group, ...]) -> None:
    titles, row, *_ = run_cli(LIGHTHOUSE_CODE, "status", "--lighthouse", lighthouse.address).stdout.splitlines()[1:]
    shown = dict(zip(titles.split(), row.split(), strict=True))
    assert (shown["PHASE"], shown["VERDICT"], shown["GROUPS"]) == ("standing", "formed", "2/2")
    seen = scrape(lighthouse.http)
    assert (seen["lighthouse_quorum_phase", "standing"], seen["lighthouse_quorum_phase", "none"]) == (1, 0)
    assert seen["lighthouse_sessions", ""] == 2
