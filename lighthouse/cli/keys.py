"""`lighthouse keys`: what a run's ranks have written down under a generation."""

import click
from rich.text import Text

from lighthouse.cli.options import ClientOptions, run_options
from lighthouse.runs.rules.key_space import key_text
from lighthouse_runtime.cli.terminal import printable


@click.command()
@run_options()
@click.option("--generation", "of", type=click.IntRange(0), help="Generation to show.  [default: the current one]")
def keys(given: ClientOptions, of: int | None) -> None:
    """List the keys that the ranks of a run have set."""
    with given.connect() as client:
        generation, found = client.get_keys(of=of, timeout_s=given.timeout)
    generation = generation if of is None else of
    rows = {key_text(generation, kind, name): value.decode(errors="replace") for (kind, name), value in found.items()}
    lines = [Text(printable(f"{name} = {value}")) for name, value in sorted(rows.items())]
    given.show({"run": given.run, "generation": generation, "keys": rows}, lambda _: lines or [Text("no keys")])
