import click
import pytest
from click.testing import CliRunner

import lighthouse.cli
import manager.cli
from lighthouse_runtime.cli import format_options


@click.command()
@format_options
def verb(output: str) -> None:
    click.echo(output)


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ((), "table"),
        (("--format", "json"), "json"),
        (("--json",), "json"),
        (("--json", "--format", "table"), "json"),
        (("--format", "table", "--json"), "json"),
    ],
)
def test_json_is_short_for_the_format(arguments: tuple[str, ...], output: str) -> None:
    assert CliRunner().invoke(verb, arguments).output == f"{output}\n"


@pytest.mark.parametrize("main", [lighthouse.cli.main, manager.cli.main])
def test_every_verb_that_has_the_format_has_the_short_form(main: click.Group) -> None:
    context = click.Context(main)
    options = {
        name: {option for param in main.get_command(context, name).params for option in param.opts}  # pyright: ignore[reportOptionalMemberAccess]
        for name in main.list_commands(context)
    }
    assert "--format" in options["status"]
    assert [name for name, found in options.items() if ("--format" in found) != ("--json" in found)] == []
