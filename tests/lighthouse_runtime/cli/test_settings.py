"""One dataclass of settings: its options, its environment variables and its defaults are the same."""

import dataclasses
from typing import Any

import click
import pytest
from click.testing import CliRunner

from lighthouse.cli import main as lighthouse_main
from lighthouse.cli.serve import main as torchft_main
from lighthouse.server.config import LighthouseConfig
from lighthouse_runtime.cli.settings import (
    CONTEXT_SETTINGS,
    from_options,
    options,
    setting,
    variables,
)
from lighthouse_runtime.cli.terminal import Duration
from manager.cli import main as manager_main
from manager.server.config import ManagerConfig

DAEMONS = [
    (LighthouseConfig, lighthouse_main.commands["serve"], "LIGHTHOUSE"),
    (LighthouseConfig, torchft_main, "LIGHTHOUSE"),
    (ManagerConfig, manager_main.commands["serve"], "LIGHTHOUSE_MANAGER"),
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
    assert (status, "Missing option '--name'" in output) == (2, True)


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
