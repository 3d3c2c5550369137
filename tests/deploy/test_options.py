"""The options and variables in the deployment files are those of the command line."""

import os
import re
from pathlib import Path

import click
import pytest

from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE

from .invocations import Invocation, invocations
from .tools import DEPLOY

_PREFIXES = ("LIGHTHOUSE_", "MANAGER_")

# Read by an Agent, not by a daemon, or by a manager without an option.
_NO_OPTIONS = {"LIGHTHOUSE_ADDRESS", "LIGHTHOUSE_MANAGER_ADDRESS", "REPLICA_GROUP_ID", MANAGER_SECRET_VARIABLE}


def program(name: str) -> click.Group:
    if name == "lighthouse":
        from lighthouse.cli import main
    else:
        from manager.cli import main
    return main


def parse(words: tuple[str, ...]) -> click.Context:
    """As the real command line does, short of running the command. Raises click.UsageError."""
    name, verb, *rest = words
    main = program(name)
    parent = click.Context(main, info_name=name, **main.context_settings)
    command = main.get_command(parent, verb)
    assert command is not None, f"{name} has no {verb}"
    return command.make_context(verb, rest, parent=parent)


def reads(context: click.Context, variable: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        patch.setenv(variable, "a sentinel")
        return any(parameter.resolve_envvar_value(context) == "a sentinel" for parameter in context.command.params)


@pytest.fixture(autouse=True)
def no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)


def test_every_kind_of_file_starts_a_daemon() -> None:
    sources = {invocation.source.split(":")[0] for invocation in invocations()}
    assert sources == {
        "Dockerfile",
        "README.md",
        "compose.yaml",
        "kubernetes/deployment.yaml",
        "kubernetes/replica-groups.yaml",
        "multi-host/jobset.yaml",
        "multi-host/leaderworkerset.yaml",
        "lighthouse-run@.service",
        "lighthouse.service",
        "train.sbatch",
    }


@pytest.mark.parametrize("invocation", invocations(), ids=str)
def test_the_command_line_takes_it_and_each_variable_is_an_option(
    invocation: Invocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in invocation.environment.items():
        monkeypatch.setenv(name, value)
    context = parse(invocation.words)
    ours = [name for name in invocation.environment if name.startswith(_PREFIXES) and name != MANAGER_SECRET_VARIABLE]
    assert [name for name in ours if not reads(context, name, monkeypatch)] == []


def test_an_option_that_is_not_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.NoSuchOption):
        parse(("lighthouse", "serve", "--minimum-replicas", "2"))
    assert not reads(parse(("lighthouse", "serve")), "LIGHTHOUSE_MINIMUM_REPLICAS", monkeypatch)


def variables_named(path: Path) -> set[str]:
    return set(re.findall(r"\b(?:LIGHTHOUSE|MANAGER)_[A-Z_]*[A-Z]\b", path.read_text()))


@pytest.mark.parametrize(
    "path", sorted(path for path in DEPLOY.rglob("*") if path.is_file()), ids=lambda path: path.name
)
def test_variables_that_are_only_mentioned_exist_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    required = ("--lighthouse", "a:1", "--replica-id", "a", "--group-world-size", "1", "--store", "a:1")
    contexts = [
        parse(("lighthouse", "serve")),
        parse(("lighthouse-manager", "serve", *required)),
        parse(("lighthouse-manager", "run", *required, "--", "train.py")),
    ]
    mentioned = variables_named(path) - _NO_OPTIONS
    unknown = {name for name in mentioned if not any(reads(context, name, monkeypatch) for context in contexts)}
    assert unknown == set()
