"""Settings of the command lines, their durations, and commands that import late."""

import dataclasses
import re
import subprocess
import sys
import threading
from typing import Any, cast

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.cli import main as lighthouse_main
from lighthouse.cli.serve import main as torchft_main
from lighthouse.server.config import LighthouseConfig
from lighthouse_runtime.cli import (
    CONTEXT_SETTINGS,
    Duration,
    LazyCommand,
    LazyGroup,
    Milliseconds,
    format_duration,
    from_options,
    options,
    parse_duration,
    setting,
    variables,
)
from lighthouse_runtime.process.commands import START_LIGHTHOUSE, START_MANAGER
from lighthouse_runtime.timing.pacing import BackgroundRead
from manager.cli import main as manager_main
from manager.server.config import ManagerConfig
from tests.processes import clean_environment


def verbs_of(main: click.Group) -> dict[str, click.Command]:
    context = click.Context(main)
    return {name: cast(click.Command, main.get_command(context, name)) for name in main.list_commands(context)}


DAEMONS = [
    (LighthouseConfig, verbs_of(lighthouse_main)["serve"], "LIGHTHOUSE"),
    (LighthouseConfig, torchft_main, "LIGHTHOUSE"),
    (ManagerConfig, verbs_of(manager_main)["serve"], "LIGHTHOUSE_MANAGER"),
]


def options_by_name(command: click.Command) -> dict[str, click.Option]:
    return {param.name or "": param for param in command.params if isinstance(param, click.Option)}


@pytest.mark.parametrize(("config", "command", "prefix"), DAEMONS)
def test_every_field_is_an_option_with_its_variables_and_default(
    config: type[Any], command: click.Command, prefix: str
) -> None:
    given = options_by_name(command)
    for field in dataclasses.fields(config):
        option = given.pop(field.name)
        name = field.name.removesuffix("_s").removesuffix("_")
        assert option.opts == ["--" + name.replace("_", "-")]
        assert option.envvar == [prefix + "_" + name.upper(), *field.metadata["env"]]
        assert field.metadata["text"].endswith(".")
        assert field.metadata["text"] in (option.help or "")
        assert all(variable in (option.help or "") for variable in option.envvar)
        if field.default is dataclasses.MISSING:
            assert option.required
        else:
            ctx = click.Context(command)
            assert option.type_cast_value(ctx, option.get_default(ctx)) == field.default
        if field.metadata["ms"]:
            alias = given.pop(field.name + "_ms")
            assert alias.opts == [option.opts[0] + "-ms"]
            assert alias.hidden
    assert all(option.hidden for option in given.values()), f"options without a setting: {sorted(given)}"


@pytest.mark.parametrize(("config", "command", "prefix"), DAEMONS)
def test_no_variable_is_read_for_two_settings(config: type[Any], command: click.Command, prefix: str) -> None:
    """Nor one that Kubernetes makes: a Service called lighthouse puts LIGHTHOUSE_PORT=tcp://... into every pod."""
    names = [name for field in dataclasses.fields(config) for name in variables(field, prefix)]
    assert len(names) == len(set(names))
    made = {f"{name}_{end}" for name in ("LIGHTHOUSE", "MANAGER") for end in ("PORT", "SERVICE_HOST", "SERVICE_PORT")}
    assert made.isdisjoint(names)


# -- a command of its own


@dataclasses.dataclass(frozen=True)
class Config:
    name: str = setting(dataclasses.MISSING, "A name.", env=("OLD_NAME", "OLDEST_NAME"))
    wait_s: float = setting(60.0, "How long.", kind=Duration(), has_ms_alias=True)
    count: int | None = setting(None, "How many.", kind=click.IntRange(min=1))
    very_loud: bool = setting(False, "Loud.")

    def __post_init__(self) -> None:
        if self.name == "nobody":
            raise ValueError("--name nobody: that is nobody's name")


@click.command(context_settings=CONTEXT_SETTINGS)
@options(Config, "X")
def command(**values: Any) -> None:
    """A command."""
    click.echo(repr(from_options(Config, values)))


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments, env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.exit_code, result.output.strip()


def made(**fields: Any) -> tuple[int, str]:
    return 0, repr(Config(**fields))


def test_defaults() -> None:
    assert run("--name", "a") == made(name="a")


@pytest.mark.parametrize("option", ["--wait=500ms", "--wait=0.5", "--wait_ms=500", "--wait-ms=500"])
def test_a_time_has_many_spellings(option: str) -> None:
    assert run("--name", "a", option) == made(name="a", wait_s=0.5)


def test_underscores_are_dashes() -> None:
    assert run("--name", "a", "--very_loud") == run("--name", "a", "--very-loud") == made(name="a", very_loud=True)


def test_a_variable_stands_for_its_option_and_the_first_one_counts() -> None:
    env = {"X_NAME": "a", "OLD_NAME": "b", "OLDEST_NAME": "c", "X_WAIT": "2m", "X_COUNT": "3", "X_VERY_LOUD": "1"}
    assert run(env=env) == made(name="a", wait_s=120.0, count=3, very_loud=True)
    assert run(env=env | {"X_NAME": ""}) == made(name="b", wait_s=120.0, count=3, very_loud=True)
    assert run("--name", "z", env=env | {"X_VERY_LOUD": "0"}) == made(name="z", wait_s=120.0, count=3)


def test_a_missing_option_is_named() -> None:
    status, output = run()
    assert (status, "Missing option '--name' (env: " in output) == (2, True)


def test_settings_that_do_not_fit_are_a_usage_error() -> None:
    status, output = run("--name", "nobody")
    assert status == 2
    assert output.endswith("Error: --name nobody: that is nobody's name")


def test_help_names_option_default_and_variables() -> None:
    status, output = run("-h")
    assert status == 0
    assert "--wait-ms" not in output
    for part in ("--name TEXT", "[env: X_NAME, OLD_NAME, OLDEST_NAME]", "--wait DURATION", "[default: 60s]", "X_WAIT"):
        assert part in " ".join(output.split()), output


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5.0), ("5", 5.0), ("2m", 120.0), ("1h", 3600.0), ("0.1ms", 0.0001), (" 5 s ", 5.0), ("-1s", -1.0)],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 parsecs", "1e3", "nan", "inf", "1,5s", "1m30s", "0x5", "٥s", "9" * 19])
def test_what_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write for example 500ms, 5s or 2m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0s"),
        (0.44, "0.4s"),
        (9.94, "9.9s"),
        (9.95, "10s"),
        (59.6, "1m00s"),
        (3599.6, "1h00m"),
        (86399.9, "1d00h"),
    ],
)
def test_a_duration_is_shown_in_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0, 1e9))
def test_what_is_shown_is_short_and_near(seconds: float) -> None:
    shown = format_duration(seconds)
    assert len(shown) <= 9
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    total = sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", shown))
    smallest = 0.1 if "." in shown else units[shown[-1]]
    assert abs(total - seconds) <= smallest + 1e-6 * seconds


@given(st.integers(1, 10**9))
def test_milliseconds_are_exact(number: int) -> None:
    assert parse_duration(f"{number}ms") == number / 1000


@pytest.mark.parametrize("value", ["0", "0ms", "-1s", 0.0, -1, float("nan"), float("inf")])
def test_an_option_wants_more_than_0(value: str | float) -> None:
    with pytest.raises(click.BadParameter, match="must be more than 0, for example 500ms, 5s or 2m"):
        Duration().convert(value, None, None)
    assert Duration().convert(60.0, None, None) == 60.0


@pytest.mark.parametrize(
    ("kind", "too_long", "longest", "unit_s"),
    [(Duration(), "876001h", "876000h", 1), (Milliseconds(), "3153600000001", "3153600000000", 1000)],
)
def test_an_option_wants_no_more_than_a_timer_can_wait(
    kind: click.ParamType, too_long: str, longest: str, unit_s: int
) -> None:
    with pytest.raises(click.BadParameter, match="is too long; at most"):
        kind.convert(too_long, None, None)
    longest_s = kind.convert(longest, None, None) / unit_s
    assert longest_s < threading.TIMEOUT_MAX
    read = BackgroundRead("answer", lambda: "read", longest_s + 1)
    assert read.result() == "read"


@pytest.mark.parametrize("words", [["watch", "--interval", "1000000000h"], ["doctor", "--timeout", "1000000000h"]])
def test_a_duration_that_no_timer_can_wait_is_a_wrong_option(words: list[str]) -> None:
    result = CliRunner().invoke(lighthouse_main, [*words, "--lighthouse", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert "'1000000000h' is too long; at most 876000h are allowed" in result.output


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
    for name, command in verbs_of(main).items():
        assert command.name == name
        assert main.verbs[name].text == command.get_short_help_str(300)
    assert verbs_of(main).keys() <= set(CliRunner().invoke(main, ["--help"]).output.partition("Options:")[2].split())


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
    assert set(completed(manager_main, [], "")) == set(verbs_of(manager_main))


WITH_FORMAT = [
    (main, name)
    for main in (lighthouse_main, manager_main)
    for name, verb in verbs_of(main).items()
    if has_format(verb)
]


@pytest.mark.parametrize(("main", "verb"), WITH_FORMAT)
def test_completes_the_formats_of_each_verb(main: click.Group, verb: str) -> None:
    assert "--format" in completed(main, [verb], "--for")
    assert set(completed(main, [verb, "--format"], "")) == {"table", "json"}
    assert set(completed(main, [verb, "--format"], "j")) == {"json"}


def asked_by_a_shell(start: str, name: str, complete: str, **words: str) -> str:
    environment = clean_environment(**{f"_{name}_COMPLETE".replace("-", "_").upper(): complete}, **words)
    command = [sys.executable, "-c", start]
    return subprocess.run(command, capture_output=True, check=True, text=True, env=environment, timeout=60).stdout


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
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    assert asked_by_a_shell(start, name, "bash_complete", **words).split() == [f"plain,{wanted}"]


def test_completion_of_verbs_imports_none_of_them() -> None:
    group = LazyGroup("x", verbs={"broken": LazyCommand("no.such.module:broken", "Do it.")})
    assert completed(group, [], "") == {"broken": "Do it."}
    with pytest.raises(ModuleNotFoundError):
        verbs_of(group)


@pytest.mark.parametrize(
    ("shell", "script"), [("bash", "complete -o nosort"), ("zsh", "#compdef"), ("fish", "complete")]
)
def test_each_program_prints_a_script_for_each_shell(shell: str, script: str) -> None:
    for start, name in ((START_LIGHTHOUSE, "lighthouse"), (START_MANAGER, "lighthouse-manager")):
        assert script in asked_by_a_shell(start, name, f"{shell}_source")
