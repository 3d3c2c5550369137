"""What the pages tell a reader to type is what the programs take."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from agent_client.restart import options
from agent_client.step import config, environment
from lighthouse.cli.serve import main as torchft_lighthouse
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from tests.docs.pages import REPOSITORY, code_spans, command_lines, pages, prose
from tests.docs.tables import PROGRAMS, verbs

# Of torchrun, of pip, of the example, of lighthouse_protocol.generate, of pytest, of the simulator, of the long run, of
# etcd, of protoc, of torchft, of click.
OTHERS = {
    "--nproc-per-node", "--master-port", "--max-restarts", "--extra-index-url", "--steps", "--pace", "--check",
    "--random-order", "--random-order-seed", "--standalone", "--rdzv-backend", "--rdzv-endpoint", "--scenario",
    "--enable-grpc-gateway", "--election-timeout", "--auto-compaction-mode", "--auto-compaction-retention",
    "--max-request-bytes", "--rdzv-id", "--rdzv-conf", "--monitor-interval", "--local-addr", "--strict",
    "--help", "--version", "--plugin", "--fault", "--seeds", "--compare", "--freeze", "--replay",
}  # fmt: skip
TORCHFTS = {"TORCHFT_LIGHTHOUSE", "TORCHFT_QUORUM_TIMEOUT_SEC"}


def commands() -> Iterator[tuple[str, click.Command]]:
    yield "torchft_lighthouse", torchft_lighthouse
    for program, main in PROGRAMS.items():
        for verb, command in verbs(main):
            yield f"{program} {verb}", command


COMMANDS = dict(commands())
OPTIONS = {name.replace("_", "-") for c in COMMANDS.values() for p in c.params for name in p.opts if name[:2] == "--"}


def typed() -> list[tuple[str, dict[str, str], str]]:
    """(page, variables set in front, the rest) of every start of our programs in an indented block."""
    found: list[tuple[str, dict[str, str], str]] = []
    for page in pages():
        for line in command_lines(page):
            variables = dict(re.findall(r"([A-Z_]+)=(\S+)", line.partition(" lighthouse")[0]))
            start = re.search(
                r"(?<![\w/.-])(?<!--rdzv-backend )(?:lighthouse(?:-manager)?|torchft_lighthouse) .*$", line
            )
            if start:
                found.append((page.name, variables, start[0]))
    return found


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    if words[0] == "torchft_lighthouse":
        return COMMANDS[words[0]], words[1:]
    named = 3 if " ".join(words[:3]) in COMMANDS else 2
    return COMMANDS[" ".join(words[:named])], words[named:]


@pytest.mark.parametrize(("page", "variables", "line"), typed(), ids=lambda value: str(value)[:60])
def test_a_command_is_taken(
    page: str, variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command, rest = command_of(shlex.split(line, comments=True))
    context = next(iter(PROGRAMS.values())).context_settings
    command.make_context(page, rest, **context)


def test_commands_are_found() -> None:
    assert {words.split()[0] for _, _, words in typed()} >= {"lighthouse", "lighthouse-manager"}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_verbs_and_options_in_the_text_exist(page: Path) -> None:
    unknown: set[str] = set()
    for code in code_spans(page):
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code))
        of_verb = next((c for name, c in COMMANDS.items() if code == name or code.startswith(name + " ")), None)
        known = {name for p in of_verb.params for name in p.opts} if of_verb else OPTIONS | OTHERS
        unknown |= {name for name in named if name.replace("_", "-") not in known}
        verb = re.match(r"lighthouse(?:-manager)? [a-z]+$", code)
        if verb and verb[0] not in COMMANDS:
            unknown.add(code)
    assert unknown == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_variables_exist(page: Path) -> None:
    text = prose(page)
    named = set(re.findall(r"\b(?:LIGHTHOUSE|MANAGER|TORCHFT|REPLICA_GROUP)_[A-Z_]*[A-Z]\b", text))
    sources = (Path(str(module.__file__)).read_text() for module in (config, environment, options))
    read = {name for source in sources for name in re.findall(r'"([A-Z_]+)"', source)} | TORCHFTS
    read.add(MANAGER_SECRET_VARIABLE)
    for command in COMMANDS.values():
        for parameter in command.params:
            read |= {parameter.envvar} if isinstance(parameter.envvar, str) else set(parameter.envvar or ())
    assert named - read == set()


def imported(source: str) -> set[str]:
    """The names that are taken from our library."""
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports if node.module == "agent_client" for alias in node.names}


def texts_of(module: Path) -> Iterator[str]:
    """Every text of a module that is not a docstring."""
    tree = ast.parse(module.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize(
    "package", ["lighthouse", "manager", "agent_client", "lighthouse_runtime", "lighthouse_protocol"]
)
def test_every_option_that_a_message_names_is_there(package: str) -> None:
    """An error, a log line or a help text that says `--x`."""
    unknown = {
        f"{module.relative_to(REPOSITORY)}: {option}"
        for module in (REPOSITORY / package).rglob("*.py")
        for text in texts_of(module)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)
        if option not in OPTIONS | OTHERS
    }
    assert not unknown
