"""docs/reference.md says what the code does. REWRITE_DOCS=1 writes its tables anew."""

import inspect
import os
import re

import pytest

from agent_client.agent.agent import Agent
from tests.docs.pages import REFERENCE, sections, with_sections
from tests.docs.tables import tables

WANTED = tables()


def reference() -> str:
    if os.environ.get("REWRITE_DOCS"):
        REFERENCE.write_text(with_sections(REFERENCE.read_text(), WANTED))
    return REFERENCE.read_text()


@pytest.mark.parametrize("name", WANTED)
def test_a_table_is_that_of_the_code(name: str) -> None:
    assert sections(reference()).get(name) == WANTED[name], "REWRITE_DOCS=1 pytest tests/docs writes it anew"


def test_nothing_else_is_marked_as_generated() -> None:
    assert sections(reference()).keys() == WANTED.keys()


def test_the_agent_has_the_options_that_are_described() -> None:
    text = reference().partition("## Agent.from_env")[2].partition("\n## ")[0]
    described = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE))
    found_out_by_from_env = {"state", "group_rank", "group_world_size", "group", "manager_process", "advertise"}
    options = {
        name: str(parameter.default)
        for name, parameter in inspect.signature(Agent.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in found_out_by_from_env
    }
    assert described == options
