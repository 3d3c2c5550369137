"""`lighthouse keys`: what a run's ranks have written down under the present generation."""

import json

import click
from rich.text import Text

from lighthouse.cli.run_options import RunChoice, run_options
from lighthouse.cli.view.output import make_console, print_lines
from lighthouse.runs.rules.key_space import key_text
from lighthouse_runtime.cli.terminal import printable


@click.command()
@run_options()
def keys(choice: RunChoice) -> None:
    """List the keys of a run's present generation, one a line, as the ranks have named them."""
    with choice.connect() as client:
        generation, found = client.get_keys(timeout_s=choice.timeout)
    rows = {key_text(generation, kind, name): value.decode(errors="replace") for (kind, name), value in found.items()}
    if choice.output == "json":
        return click.echo(json.dumps({"run": choice.run, "generation": generation, "keys": rows}, indent=2))
    lines = [Text(printable(f"{name} = {value}")) for name, value in sorted(rows.items())]
    return print_lines(make_console(), lines or [Text("no keys")])
