"""docs/reference says what the code does. REWRITE_DOCS=1 rewrites its generated parts."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_client.errors import GroupDrained
from agent_client.restart import options
from agent_client.restart.store import RestartAbort
from agent_client.step import config
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from lighthouse_protocol.rules.access import POLICY
from lighthouse_runtime.process.loop import STOP_SIGNALS
from manager.supervisor.config import SupervisorConfig
from manager.supervisor.rules.machine import STOPPED_STATUS
from tests.docs.pages import REFERENCE, REPOSITORY, sections, with_sections
from tests.docs.tables import PROGRAMS, tables, verbs

WANTED = tables()
PARTS = [(page, name) for page, parts in WANTED.items() for name in parts]


def text_of(page: str) -> str:
    path = REFERENCE / page
    if os.environ.get("REWRITE_DOCS") and page in WANTED:
        path.write_text(with_sections(path.read_text(), WANTED[page]))
    return path.read_text()


@pytest.mark.parametrize(("page", "name"), PARTS)
def test_a_generated_part_is_that_of_the_code(page: str, name: str) -> None:
    assert sections(text_of(page)).get(name) == WANTED[page][name], "REWRITE_DOCS=1 pytest tests/docs rewrites it"


@pytest.mark.parametrize("page", sorted(path.name for path in REFERENCE.glob("*.md")))
def test_nothing_else_is_marked_as_generated(page: str) -> None:
    assert sections(text_of(page)).keys() == WANTED.get(page, {}).keys()


# -- cli.md


def test_every_command_has_a_heading() -> None:
    headings = set(re.findall(r"^### (.*)$", text_of("cli.md"), re.MULTILINE))
    assert {f"{program} {verb}" for program, main in PROGRAMS.items() for verb, _ in verbs(main)} <= headings


# -- options.md


def test_every_variable_of_a_rank_is_explained() -> None:
    sources = [Path(str(module.__file__)).read_text() for module in (config, options)]
    read = {name for source in sources for name in re.findall(r'"([A-Z]+(?:_[A-Z]+)+|RANK)"', source)}
    explained = set(re.findall(r"`([A-Z_]+)`", text_of("options.md")))
    assert read | {MANAGER_SECRET_VARIABLE} <= explained


# -- metrics.md


def metrics_in_code() -> Iterator[str]:
    """Names of the lighthouse's metrics; a counter's lacks its _total. The page shows a whole scrape of a manager."""
    for module in (REPOSITORY / "lighthouse").rglob("*.py"):
        if "prometheus_client" in (source := module.read_text()):
            yield from re.findall(r'"(lighthouse(?:_[a-z]+)+)"', source)


def test_every_metric_of_the_code_is_on_the_page() -> None:
    found = set(metrics_in_code())
    rows = set(re.findall(r"^\| `(\w+)` \|", text_of("metrics.md"), re.MULTILINE))
    assert len(found) > 40
    assert {name for name in found if name not in rows and f"{name}_total" not in rows} == set()


# -- http.md


def test_every_route_is_on_the_page_with_its_role() -> None:
    rows = re.findall(r"^\| `((?:GET|POST) \S+)` \| (\w+) \|", text_of("http.md"), re.MULTILINE)
    routes = {path: needed for path, needed in POLICY.items() if not path.startswith("/")}
    assert dict(rows) == {path: " or ".join(sorted(needed)) for path, needed in routes.items()}


# -- wire.md


def test_every_rpc_is_on_the_page_with_its_role() -> None:
    text = text_of("wire.md")
    for service in ("lighthouse.v1.LighthouseService", "manager.v1.ManagerService"):
        part = text.partition(f"## {service}\n")[2].partition("\n## ")[0]
        rows = dict(re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", part, re.MULTILINE))
        prefix = f"/{service}/"
        assert rows == {
            path.removeprefix(prefix): " or ".join(sorted(needed))
            for path, needed in POLICY.items()
            if path.startswith(prefix)
        }


# -- exit-codes.md


def statuses(heading: str) -> set[str]:
    part = text_of("exit-codes.md").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\d+)` \|", part, re.MULTILINE))


def test_exit_statuses_are_those_of_the_code() -> None:
    stop_code = SupervisorConfig.__dataclass_fields__["stop_exit_code"].default
    assert STOPPED_STATUS == stop_code == RestartAbort().code == 128 + signal.SIGINT
    assert issubclass(GroupDrained, SystemExit)
    assert GroupDrained("left").code in (None, 0)
    by_signal = {str(128 + number) for number in STOP_SIGNALS}
    assert statuses("lighthouse-manager run") == {"0", "1", "2", str(STOPPED_STATUS)} | by_signal
    assert statuses("lighthouse serve and lighthouse-manager serve") == {"0", "1", "2"} | by_signal
    assert statuses("Ranks") >= {"0", "1", str(STOPPED_STATUS)}
