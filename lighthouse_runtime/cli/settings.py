"""Settings of a daemon, and command groups that import their verbs lazily.

A frozen dataclass of settings defines options, environment variables and the reference documentation:

    @dataclass(frozen=True)
    class Config:
        join_timeout_s: float = setting(60.0, "How long ...", kind=Duration(), has_ms_alias=True)

defines `--join-timeout 60s`, the variable PREFIX_JOIN_TIMEOUT, and, for torchft, `--join_timeout_ms 60000`. Underscores
and dashes are interchangeable in option names.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from lighthouse_runtime.cli.terminal import Milliseconds

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., object])

# Shared by all our commands; makes --min_replicas an alias of --min-replicas.
CONTEXT_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}


def setting(
    default: Any,
    text: str,
    *,
    kind: click.ParamType | type | None = None,
    env: Sequence[str] = (),
    has_ms_alias: bool = False,
    metavar: str | None = None,
) -> Any:
    """Define a field of a settings class.

    Args:
        default: Default value. dataclasses.MISSING makes the option required.
        text: Help text.
        kind: Type of the option's value, for click.
        env: Environment variables that are read if the field's own variable is not set.
        has_ms_alias: Adds a hidden alias of the option that takes milliseconds.
        metavar: Placeholder of the value in the help text.
    """
    about = {"text": text, "kind": kind, "env": tuple(env), "ms": has_ms_alias, "metavar": metavar}
    return dataclasses.field(default=default, metadata=about)


def option_name(field: dataclasses.Field[Any]) -> str:
    return "--" + _name(field).replace("_", "-")


def variables(field: dataclasses.Field[Any], prefix: str) -> list[str]:
    """Return the environment variables of a setting, in order of precedence."""
    return [f"{prefix}_{_name(field).upper()}", *field.metadata["env"]]


def _name(field: dataclasses.Field[Any]) -> str:
    # A suffix `_s` means seconds. Any other final `_` avoids a Python keyword.
    return field.name.removesuffix("_s").removesuffix("_")


def options(config: type[Any], prefix: str) -> Callable[[F], F]:
    """Return a decorator that adds the options of `config` to a click command."""

    def decorate(command: F) -> F:
        for field in reversed(dataclasses.fields(config)):
            if field.metadata["ms"]:
                command = _ms_alias(field)(command)
            command = _option(field, prefix)(command)
        return command

    return decorate


def from_options(config: type[C], values: dict[str, Any]) -> C:
    """Create the settings object from click's option values. Raises click.UsageError if they are inconsistent."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    chosen = {field.name: values[field.name] for field in fields}
    for field in fields:
        in_ms = values.get(f"{field.name}_ms")
        if in_ms is not None:
            chosen[field.name] = in_ms / 1000
    try:
        return config(**chosen)
    except ValueError as e:
        raise click.UsageError(str(e)) from None


def _option(field: dataclasses.Field[Any], prefix: str) -> Callable[[F], F]:
    about, is_required = field.metadata, field.default is dataclasses.MISSING
    names = variables(field, prefix)
    return click.option(
        option_name(field),
        field.name,
        type=about["kind"],
        is_flag=field.default is False,
        required=is_required,
        **({} if is_required else {"default": _written(field)}),  # an explicit None would satisfy `required`
        show_default=not is_required and field.default is not None and field.default is not False,
        envvar=names,
        show_envvar=False,
        metavar=about["metavar"],
        help=f"{about['text']}  [env: {', '.join(names)}]",
    )


def _written(field: dataclasses.Field[Any]) -> Any:
    """Return the default value as a user would write it, for example 60s."""
    return f"{field.default:g}s" if field.name.endswith("_s") and field.default is not None else field.default


def _ms_alias(field: dataclasses.Field[Any]) -> Callable[[F], F]:
    return click.option(option_name(field) + "-ms", f"{field.name}_ms", type=Milliseconds(), hidden=True)


# Verbs that are imported when they run. `--help` and shell completion import none of them.

LONGEST = 300  # characters of a verb's line


class LazyCommand(NamedTuple):
    """Where to import a verb from, and its line in the help text."""

    where: str  # MODULE:NAME
    text: str  # line in the list of verbs; a test compares it with the command's own
    section: str = "Commands"  # heading in the list of verbs


class LazyCommands(MutableMapping[str, click.Command]):
    """Mapping of names to commands, in alphabetical order. Importing a command happens on first access."""

    def __init__(self, lazy: Mapping[str, LazyCommand]) -> None:
        self._lazy = dict(lazy)
        self._loaded: dict[str, click.Command] = {}

    def text(self, name: str) -> str:
        """Return the verb's line for the list of verbs, without importing the verb."""
        return self._lazy[name].text if name in self._lazy else self._loaded[name].get_short_help_str(LONGEST)

    def sections(self) -> dict[str, list[str]]:
        """Return the names of the verbs by section. Sections and verbs are in order of definition."""
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
    """A click group that imports its verbs lazily."""

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
