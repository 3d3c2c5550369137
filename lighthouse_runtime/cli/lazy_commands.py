"""The verbs of a command, each imported when it is run: `--help` and shell completion import none of them."""

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

LONGEST = 300
"""Characters of a verb's line."""


class Lazy(NamedTuple):
    """A verb: where it is, as MODULE:NAME, and its line in the list of verbs, which a test compares with its own."""

    where: str
    text: str
    section: str = "Commands"  # heading of the list of verbs


class LazyCommands(MutableMapping[str, click.Command]):
    """Verbs by their names, in the order of their names."""

    def __init__(self, lazy: Mapping[str, Lazy]) -> None:
        self._lazy = dict(lazy)
        self._loaded: dict[str, click.Command] = {}

    def text(self, name: str) -> str:
        """The verb's line in the list of verbs."""
        return self._lazy[name].text if name in self._lazy else self._loaded[name].get_short_help_str(LONGEST)

    def sections(self) -> dict[str, list[str]]:
        """Verbs by the heading of their section, both in the order given."""
        found: dict[str, list[str]] = {}
        for name, verb in self._lazy.items():
            found.setdefault(verb.section, []).append(name)
        return found

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            module, _, attribute = self._lazy[name].where.partition(":")
            self._loaded[name] = getattr(importlib.import_module(module), attribute)
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        if self._lazy.pop(name, None) is None and name not in self._loaded:
            raise KeyError(name)
        self._loaded.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._lazy, *self._loaded}))

    def __len__(self) -> int:
        return len({*self._lazy, *self._loaded})


class LazyGroup(click.Group):
    """A command whose verbs are LazyCommands."""

    def __init__(self, *args: Any, commands: LazyCommands, **more: Any) -> None:
        super().__init__(*args, commands=commands, **more)
        self._verbs = commands

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, self._verbs))
        for title, names in self._verbs.sections().items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), self._verbs.text(name)) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        verbs = [name for name in self._verbs if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=self._verbs.text(name)) for name in verbs), *options]
