"""docs/reference/timeouts.md has every timeout with the code's default, and its orders hold for the defaults."""

import dataclasses
import re
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest

from agent_client.restart.options import Options
from agent_client.step.config import AgentConfig
from agent_client.torchrun.handler import Options as TorchrunOptions
from lighthouse.job.presence import USUAL_BEAT_INTERVAL_S
from lighthouse.server.config import LighthouseConfig
from lighthouse_runtime.cli import Duration, option_name
from lighthouse_runtime.server import grpc_server
from manager.server.config import ManagerConfig
from manager.supervisor.config import SupervisorConfig
from tests.docs.pages import REPOSITORY, table_rows

COMMANDS = {
    "lighthouse serve": LighthouseConfig,
    "lighthouse-manager serve": ManagerConfig,
    "lighthouse-manager run": SupervisorConfig,
}
GRPC = dict(grpc_server.options(LighthouseConfig().keepalive_s))
FIXED: dict[str, float | None] = {
    "beat": USUAL_BEAT_INTERVAL_S,
    "keepalive": (GRPC["grpc.keepalive_time_ms"] + GRPC["grpc.keepalive_timeout_ms"]) / 1000,
}


class Row(NamedTuple):
    name: str
    set_by: str
    default: str
    longer_than: str


PAGE = (REPOSITORY / "docs/reference/timeouts.md").read_text()
ROWS = {cells[0]: Row(*cells[:4]) for cells in table_rows(PAGE, 5)}


def in_code() -> dict[str, float | None]:
    """Every timeout by what sets it, in seconds; None: never."""
    found: dict[str, float | None] = {}
    for command, config in COMMANDS.items():
        found |= {
            f"`{command} {option_name(field)}`": field.default
            for field in dataclasses.fields(config)
            if isinstance(field.metadata["kind"], Duration)
        }
    found["`lighthouse serve --lease`"] = found["`lighthouse serve --heartbeat-timeout`"]
    agent = (field for field in dataclasses.fields(AgentConfig) if field.name.endswith("_s"))
    found |= {f"`Agent.from_env({field.name}=...)`": field.default for field in agent}
    wrapper = (name for name, kind in get_type_hints(Options).items() if float in get_args(kind))
    found |= {f"`Wrapper({name}=...)`": getattr(Options(), name) for name in wrapper}
    found |= {f"`--rdzv-conf {name}`": value for name, value in dataclasses.asdict(TorchrunOptions()).items()}
    return found


def on_page(default: str) -> float | None:
    """The length of time that a row begins with."""
    if default == "never":
        return None
    seconds = re.match(r"([\d.]+) s\b", default)
    assert seconds is not None, default
    return float(seconds[1])


def test_every_timeout_of_the_code_has_a_row_with_its_default() -> None:
    assert {row.set_by: on_page(row.default) for row in ROWS.values() if row.set_by in in_code()} == in_code()


@pytest.mark.parametrize("name", FIXED)
def test_what_is_fixed_is_so_long(name: str) -> None:
    assert on_page(ROWS[name].default) == FIXED[name]


def test_no_other_row_is_there() -> None:
    others = {row.name for row in ROWS.values() if row.set_by not in in_code()}
    assert others == {*FIXED, "stop grace"}


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.longer_than], ids=lambda row: row.name)
def test_the_defaults_are_in_this_order(row: Row) -> None:
    least = sum(map(term, row.longer_than.split(" + ")))
    own: Any = on_page(row.default)
    assert own > least, f"{row.name} is not longer than {row.longer_than}"


def term(text: str) -> float:
    """`lease` or `2 x lease`, in seconds."""
    times, _, name = text.rpartition(" x ")
    seconds: Any = on_page(ROWS[name].default)
    return float(times or 1) * seconds
