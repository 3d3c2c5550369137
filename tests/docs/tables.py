"""The generated parts of docs/reference, from the settings, the commands and the metrics themselves."""

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families

import lighthouse.cli
import manager.cli
from agent_client.restart.options import Options as WrapperOptions
from agent_client.step.config import AgentConfig
from lighthouse.job.incident_driver import IncidentTimes, JobAccount
from lighthouse.job.records import Group
from lighthouse.job.restarts import RunMachine
from lighthouse.job.status import run_status
from lighthouse.server.config import ENV_PREFIX as LIGHTHOUSE_PREFIX
from lighthouse.server.config import LighthouseConfig
from lighthouse.server.metrics import Scrape, render
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_protocol.messages.session import GroupCounts, GroupReport, HeldQuorum, HoldState
from lighthouse_protocol.messages.status import ManagerStatus
from lighthouse_protocol.rules.rate_limits import PeerLimits, Resource
from lighthouse_runtime.cli import Duration, option_name, variables
from manager.server.config import ENV_PREFIX as MANAGER_PREFIX
from manager.server.config import ManagerConfig
from manager.server.daemon import render as render_manager
from manager.supervisor.config import SupervisorConfig
from tests.lighthouse.statuses import job, member, status

PROGRAMS = {"lighthouse": lighthouse.cli.main, "lighthouse-manager": manager.cli.main}


def tables() -> dict[str, dict[str, str]]:
    """Return the generated parts by their name, by the name of their page."""
    return {
        "cli.md": {
            "commands": _commands(),
            "client options": _options(CLIENT_OPTIONS.values()),
            **{f"commands of {program}": _manual(program, main) for program, main in PROGRAMS.items()},
        },
        "options.md": {
            "lighthouse serve": _settings(LighthouseConfig, LIGHTHOUSE_PREFIX),
            "lighthouse-manager serve": _settings(ManagerConfig, MANAGER_PREFIX),
            "lighthouse-manager run": _settings(SupervisorConfig, MANAGER_PREFIX),
            "AgentConfig": _fields(AgentConfig),
            "Wrapper": _fields(WrapperOptions),
        },
        "metrics.md": {
            "lighthouse metrics": _metrics(_lighthouse_scrape()),
            "lighthouse-manager metrics": _metrics(_manager_scrape()),
        },
        "limits.md": {"limits of a peer": _limits(PeerLimits())},
    }


def verbs(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Every verb, and instead of a group its verbs, with its name in front."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{name} {verb}", below) for verb, below in verbs(command))
        else:
            yield name, command


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


# -- limits of a peer


def _limits(limits: PeerLimits) -> str:
    rates = [(resource.value, limits.rate(resource)) for resource in Resource]
    rows = [(name, _amount(name, rate.at_once), _amount(name, rate.per_s)) for name, rate in rates]
    return _table(("limit of one peer", "burst", "per second after the burst"), rows)


def _amount(name: str, amount: float) -> str:
    if not name.startswith("bytes"):
        return f"{amount:,.0f}"
    return f"{amount / 2**20:g} MiB" if amount >= 2**20 else f"{amount / 2**10:g} KiB"


# -- settings: the options of the daemons


def _settings(config: type[Any], prefix: str) -> str:
    return _table(
        ("option", "default", "environment", "meaning"), (_setting(f, prefix) for f in dataclasses.fields(config))
    )


def _setting(field: dataclasses.Field[Any], prefix: str) -> Sequence[str]:
    words = " ".join(filter(None, (option_name(field), _value_name(field))))
    in_ms = f" In milliseconds: {_code(option_name(field) + '-ms')}." if field.metadata["ms"] else ""
    environment = ", ".join(map(_code, variables(field, prefix)))
    return _code(words), _default(field), environment, _DEFAULT_IN_WORDS.sub("", field.metadata["text"]) + in_ms


def _value_name(field: dataclasses.Field[Any]) -> str:
    kind = field.metadata["kind"]
    if field.default is False:
        return ""
    return field.metadata["metavar"] or _kind_name(kind)


def _kind_name(kind: object) -> str:
    match kind:
        case Duration():
            return "DURATION"
        case click.IntRange():
            return "N"
        case click.Path():
            return "FILE"
        case click.Choice():
            return "|".join(kind.choices)
        case _:
            return "TEXT"


# Where a default is no value: "How long ...; default: the heartbeat timeout."
_DEFAULT_IN_WORDS = re.compile(r"[;.] [Dd]efault: ([^;.]+)")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default is False:
        return "off"
    if field.default == sys.executable:
        return "its own"
    if field.default is None:
        in_words = _DEFAULT_IN_WORDS.search(field.metadata["text"])
        return in_words[1] if in_words else ""
    if isinstance(field.metadata["kind"], Duration):
        return _code(f"{field.default:g}s")
    return _code(str(field.default)) if field.default else ""


# -- commands

SETTINGS = {
    "lighthouse serve": (LighthouseConfig,),
    "lighthouse-manager serve": (ManagerConfig,),
    "lighthouse-manager run": (SupervisorConfig, ManagerConfig),
}
"""Commands whose options are settings: their tables are in options.md."""


def _client_options() -> dict[str, click.Option]:
    """Return the options that every command with --lighthouse has, as `status` declares them."""
    clients = {
        name: {option.name or "": option for option in _shown(command)}
        for name, command in verbs(lighthouse.cli.main)
        if f"lighthouse {name}" not in SETTINGS and any("--lighthouse" in p.opts for p in command.params)
    }
    return {
        name: option
        for name, option in clients["status"].items()
        if all(name in options for options in clients.values())
    }


def _shown(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


CLIENT_OPTIONS = _client_options()


def _commands() -> str:
    """A table of all commands, with what each does."""
    found = [(f"{program} {verb}", command) for program, main in PROGRAMS.items() for verb, command in verbs(main)]
    rows = [(f"[`{name}`](#{name.replace(' ', '-')})", command.get_short_help_str(300)) for name, command in found]
    return _table(("command", "does"), rows)


def _manual(program: str, main: click.Group) -> str:
    return "\n".join(_section(f"{program} {verb}", command) for verb, command in sorted(verbs(main)))


def _section(name: str, command: click.Command) -> str:
    usage = " ".join([name, *command.collect_usage_pieces(click.Context(command, info_name=name))])
    parts = [f"### {name}", f"```text\n{usage}\n```", *_paragraphs(command)]
    settings = {field.name for config in SETTINGS.get(name, ()) for field in dataclasses.fields(config)}
    is_client = any("--lighthouse" in option.opts for option in _shown(command)) and not settings
    own = [option for option in _shown(command) if option.name not in settings]
    if is_client:
        own = [option for option in own if option.name not in CLIENT_OPTIONS]
    if own:
        parts.append(_options(own).rstrip())
    if settings:
        configs = {"lighthouse-manager run": ("lighthouse-manager run", "lighthouse-manager serve")}.get(name, (name,))
        links = " and ".join(f"[`{each}`](options.md#{each.replace(' ', '-')})" for each in configs)
        parts.append(f"Settings: {links}.")
    if is_client:
        parts.append(_client_line(command))
    return "\n\n".join(parts) + "\n"


def _client_line(command: click.Command) -> str:
    """Name the client options, and those that differ in this command."""
    differs: list[str] = []
    for option in _shown(command):
        common = CLIENT_OPTIONS.get(option.name or "")
        if common is not None and option.default != common.default:
            differs.append(f"`{option.opts[0]}` defaults to `{option.default}`")
        elif common is not None and option.help != common.help:
            text, default = _help(option)
            differs.append(f"`{option.opts[0]}`: {text.rstrip('.')}" + (f" (default: {default})" if default else ""))
    return f"Plus the [client options](#client-options){'; ' if differs else ''}{'; '.join(differs)}."


def _paragraphs(command: click.Command) -> list[str]:
    """The help text as Markdown. click keeps the lines of a paragraph that starts with \\b."""
    paragraphs = inspect.cleandoc(command.help or "").split("\f")[0].strip().split("\n\n")
    return [
        "```text\n" + paragraph.removeprefix("\b\n").rstrip() + "\n```" if paragraph.startswith("\b") else paragraph
        for paragraph in paragraphs
    ]


def _options(options: Iterable[click.Option]) -> str:
    return _table(("option", "default", "environment", "meaning"), map(_option, options))


def _option(option: click.Option) -> Sequence[str]:
    value = "" if option.is_flag else f" {option.metavar or _kind_name(option.type)}"
    names = ", ".join(_code(name + value * (name == option.opts[-1])) for name in option.opts)
    environment = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    text, in_words = _help(option)
    default = _code(str(option.default)) if option.default and option.show_default else in_words
    return names, default, ", ".join(map(_code, environment)), text


_DEFAULT_IN_HELP = re.compile(r"\s*\[default: (.+?)\]")


def _help(option: click.Option) -> tuple[str, str]:
    """The help text, and the default that it names in brackets."""
    text = (option.help or "").replace("|", "\\|")
    in_words = _DEFAULT_IN_HELP.search(text)
    default = in_words[1] if in_words else ""
    return _DEFAULT_IN_HELP.sub("", text), _code(default) if re.fullmatch(r"\w+", default) else default


# -- options of the library


def _fields(config: type[Any]) -> str:
    """Return the table of a dataclass with a docstring under each field."""
    body = ast.parse(inspect.getsource(config)).body[0].body  # type: ignore[attr-defined]
    texts = {
        field.target.id: " ".join(inspect.cleandoc(text.value.value).split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    rows = (
        (_code(f.name), _code(_default_of(f)), texts[f.name].replace("|", "\\|")) for f in dataclasses.fields(config)
    )
    return _table(("option", "default", "meaning"), rows)


def _default_of(field: dataclasses.Field[Any]) -> str:
    return "" if field.default in (None, dataclasses.MISSING) else str(field.default)


# -- metrics


def _lighthouse_scrape() -> bytes:
    times = IncidentTimes()
    times.count_opened("default", IncidentKind.LOSS)
    times.add_detect_time("default", IncidentKind.LOSS, 0.1)
    times.add_recover_time("default", IncidentKind.LOSS, 1.0)
    scrape = Scrape(
        status(job(member("a"))),
        runs=[run_status(("default", "default"), RunMachine(), 0.0)],
        accounts={"default": _trained()},
        phase_s={"default": {"step": 1.0}},
        slowness={"default": []},
        incidents=times,
    )
    return render(scrape)[0]


def _trained() -> JobAccount:
    account = JobAccount({"a": Group("a", "i1", -1.0)})
    account.add_report("a", GroupReport(HeldQuorum(1, HoldState.STANDING, 0), counts=GroupCounts()), -1.0)
    return account


def _manager_scrape() -> bytes:
    values = {field.name: 0 for field in dataclasses.fields(ManagerStatus)} | {"ranks_waiting": (), "kept": ()}
    return render_manager(ManagerStatus(**values))[0]  # pyright: ignore[reportArgumentType]


def _metrics(scrape: bytes) -> str:
    return _table(
        ("metric", "labels", "type", "meaning"),
        (_metric(family) for family in text_string_to_metric_families(scrape.decode())),
    )


def _metric(family: Any) -> Sequence[str]:
    name = family.samples[0].name if family.type != "histogram" else family.name
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    return _code(name), ", ".join(map(_code, labels)), family.type, family.documentation.rstrip(".")
