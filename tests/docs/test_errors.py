"""docs/reference/errors.md explains every verdict, and quotes no message that the code does not have."""

import ast
import re
from collections.abc import Iterator

from lighthouse.job.records import Verdict
from tests.docs.pages import REFERENCE, REPOSITORY

PACKAGES = ("agent_client", "lighthouse", "lighthouse_protocol", "lighthouse_runtime", "manager")
HOLE = "\0"
PLACEHOLDER = "..."
EXAMPLES = {"state['model']['0.weight']: shape (8, 4) here, (16, 4) received"}
"""Messages that are quoted with values in place of `...`."""
OF_LIBRARIES = ("RESOURCE_EXHAUSTED", "The batch received was empty, your model won't be able to train on it")
"""Messages that gRPC and transformers raise."""


def page() -> str:
    return (REFERENCE / "errors.md").read_text()


def headings() -> list[str]:
    return re.findall(r"^### `(.+)`$", page(), re.MULTILINE)


def quoted() -> Iterator[str]:
    """Messages on the page: its headings, and the other code that has a placeholder."""
    yield from headings()
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page()):
        if PLACEHOLDER in code and code not in headings() and code != PLACEHOLDER and "(...," not in code:
            yield code


def texts_of_the_code() -> str:
    """All strings of the packages, one a line, with a hole for each value that an f-string fills in."""
    found: list[str] = []
    for package in PACKAGES:
        for module in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append("".join(_text(part) for part in node.values))
                elif isinstance(node, ast.ClassDef):
                    found.append(node.name)
    return "\n".join(" ".join(text.split()) for text in found)


def _text(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else HOLE


def test_every_verdict_is_explained() -> None:
    part = page().partition("\n## Verdicts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### `(\w+)`$", part, re.MULTILINE) == list(Verdict)


def test_every_message_of_the_page_is_in_the_code() -> None:
    code = "\n".join([texts_of_the_code(), *OF_LIBRARIES])
    stale = [
        f"{message}: {fragment}"
        for message in quoted()
        if message not in EXAMPLES
        for fragment in (part.strip(" ()") for part in message.split(PLACEHOLDER))
        if len(fragment) > 2 and fragment not in code
    ]
    assert stale == [], "the code has another text: change the page"


def test_headings_differ() -> None:
    assert len(headings()) == len(set(headings())) > 80


def test_every_exception_of_the_agent_is_explained() -> None:
    source = ast.parse((REPOSITORY / "agent_client/errors.py").read_text())
    names = {node.name for node in source.body if isinstance(node, ast.ClassDef)} - {"AgentError"}
    assert names <= set(headings())
