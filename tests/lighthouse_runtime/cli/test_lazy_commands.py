import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from lighthouse.cli import main as lighthouse_main
from lighthouse_runtime.cli.settings import LONGEST, LazyCommand, LazyCommands, LazyGroup
from lighthouse_runtime.process.commands import START_LIGHTHOUSE, START_MANAGER
from manager.cli import main as manager_main
from tests.processes import clean_environment

HEAVY = {"aiohttp", "asyncio", "cryptography", "google", "grpc", "prometheus_client", "rich", "sqlite3", "uvloop"}
DAEMONS_ONLY = {
    "aiohttp", "cryptography", "prometheus_client", "sqlite3", "uvloop",
    "lighthouse.server", "lighthouse.store", "lighthouse_protocol.wire.streams",
}  # fmt: skip


def imported(start: str, *args: str) -> set[str]:
    """Every module that a command has imported when it ends."""
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('\\n'.join(sys.modules), file=sys.__stderr__))\n"
        f"sys.argv[1:] = {list(args)!r}\n{start}"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return set(ended.stderr.splitlines())


@pytest.mark.parametrize("start", [START_LIGHTHOUSE, START_MANAGER])
@pytest.mark.parametrize("asked", ["--help", "--version"])
def test_help_imports_nothing_heavy(start: str, asked: str) -> None:
    found = imported(start, asked)
    assert "click" in found
    assert found & HEAVY == set()


def test_a_verb_that_asks_a_lighthouse_imports_no_daemon() -> None:
    found = imported(START_LIGHTHOUSE, "status", "--lighthouse", "127.0.0.1:1", "--timeout", "100ms")
    assert "grpc" in found
    assert found & DAEMONS_ONLY == set()


@pytest.mark.parametrize("main", [lighthouse_main, manager_main], ids=lambda main: main.name)
def test_each_line_in_the_list_is_the_verbs_own(main: click.Group) -> None:
    assert isinstance(main, LazyGroup)
    for name, command in main.commands.items():
        assert isinstance(main.commands, LazyCommands)
        assert command.name == name
        assert main.commands.text(name) == command.get_short_help_str(LONGEST)


@pytest.mark.parametrize("main", [lighthouse_main, manager_main], ids=lambda main: main.name)
def test_the_list_has_every_verb(main: click.Group) -> None:
    lines = CliRunner().invoke(main, ["--help"]).output.partition("Options:")[2].split()
    assert set(main.commands) <= set(lines)


def has_format(verb: click.Command) -> bool:
    return any("--format" in param.opts for param in verb.params)


def completed(main: click.Group, typed: list[str], incomplete: str) -> dict[str, str | None]:
    found = ShellComplete(main, {}, "lighthouse", "_LIGHTHOUSE_COMPLETE").get_completions(typed, incomplete)
    return {item.value: item.help for item in found}


def test_completes_verbs_with_their_lines_and_options() -> None:
    assert completed(lighthouse_main, [], "inc") == {
        "incident": "Show an incident: its timeline and what each rank was doing.",
        "incidents": "List incidents, newest first.",
    }
    assert set(completed(lighthouse_main, ["incidents"], "--k")) == {"--kind"}
    assert {"stall", "loss"} <= set(completed(lighthouse_main, ["incidents", "--kind"], ""))
    assert set(completed(manager_main, [], "")) == set(manager_main.commands)


@pytest.mark.parametrize("verb", [name for name, verb in lighthouse_main.commands.items() if has_format(verb)])
def test_completes_the_formats_of_each_verb(verb: str) -> None:
    assert "--format" in completed(lighthouse_main, [verb], "--for")
    assert set(completed(lighthouse_main, [verb, "--format"], "")) == {"table", "json"}
    assert set(completed(lighthouse_main, [verb, "--format"], "j")) == {"json"}


def test_completes_the_formats_of_a_manager_s_status() -> None:
    assert set(completed(manager_main, ["status", "--format"], "")) == {"table", "json"}


@pytest.mark.parametrize(
    ("start", "name", "typed", "wanted"),
    [
        (START_LIGHTHOUSE, "lighthouse", "lighthouse doc", "doctor"),
        (START_LIGHTHOUSE, "lighthouse", "lighthouse doctor --format j", "json"),
        (START_MANAGER, "lighthouse-manager", "lighthouse-manager sta", "status"),
    ],
)
def test_a_shell_is_answered(start: str, name: str, typed: str, wanted: str) -> None:
    """As bash asks: the words that were typed, and which of them is being completed."""
    variable = f"_{name}_COMPLETE".replace("-", "_").upper()
    environment = clean_environment(
        **{variable: "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    )
    command = [sys.executable, "-c", start]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (0, [f"plain,{wanted}"])


def test_completion_of_verbs_imports_none_of_them() -> None:
    group = LazyGroup("x", commands=LazyCommands({"broken": LazyCommand("no.such.module:broken", "Do it.")}))
    assert completed(group, [], "") == {"broken": "Do it."}
    with pytest.raises(ModuleNotFoundError):
        group.commands["broken"]


def test_verbs_may_be_added_and_taken_away() -> None:
    commands = LazyCommands({"b": LazyCommand("no.such.module:b", "Do b.")})
    commands["a"] = click.Command("a", help="Do a. And more.")
    assert (list(commands), commands.text("a"), len(commands)) == (["a", "b"], "Do a.", 2)
    del commands["b"]
    assert list(commands) == ["a"]
    with pytest.raises(KeyError):
        del commands["b"]


@pytest.mark.parametrize(
    ("shell", "script"), [("bash", "complete -o nosort"), ("zsh", "#compdef"), ("fish", "complete")]
)
def test_each_program_prints_a_script_for_each_shell(shell: str, script: str) -> None:
    for start, name in ((START_LIGHTHOUSE, "lighthouse"), (START_MANAGER, "lighthouse-manager")):
        variable = f"_{name}_COMPLETE".replace("-", "_").upper()
        environment = clean_environment(**{variable: f"{shell}_source"})
        ended = subprocess.run(
            [sys.executable, "-c", start], capture_output=True, text=True, env=environment, timeout=60
        )
        assert ended.returncode == 0
        assert script in ended.stdout
