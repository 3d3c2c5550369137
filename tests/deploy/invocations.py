"""Every start of our daemons that the deployment files and their README write down."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .tools import DEPLOY, REPOSITORY, yaml_documents

_PROGRAMS = ("lighthouse", "lighthouse-manager")


@dataclass(frozen=True)
class Invocation:
    """`environment` is what the file sets for this daemon."""

    source: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.source}:{self.words[0]}"


def invocations() -> list[Invocation]:
    return [*_of_dockerfile(), *_of_systemd(), *_of_compose(), *_of_kubernetes(), *_of_slurm(), *_of_readme()]


def _of_dockerfile() -> Iterator[Invocation]:
    for line in (REPOSITORY / "Dockerfile").read_text().splitlines():
        if line.startswith("CMD "):
            yield Invocation("Dockerfile", tuple(json.loads(line.removeprefix("CMD "))))


def _of_systemd() -> Iterator[Invocation]:
    """The environment files are those beside the units, under the names that they are installed with."""
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        text = unit.read_text().replace("%i", "group-0")
        assignments = re.findall(r"^Environment=(.*)$", text, re.MULTILINE)
        for path in re.findall(r"^EnvironmentFile=-?/etc/lighthouse/(.*)$", text, re.MULTILINE):
            shipped = DEPLOY / "systemd" / path
            assignments += shipped.read_text().splitlines() if shipped.exists() else []
        for command in re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE):
            program, *rest = shlex.split(command)
            yield Invocation(unit.name, (Path(program).name, *rest), _environment(assignments))


def _environment(lines: Iterable[str]) -> dict[str, str]:
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def _of_compose() -> Iterator[Invocation]:
    """What is left to the caller, ${NAME:-default}, has its default."""
    text = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", (DEPLOY / "compose" / "compose.yaml").read_text())
    (compose,) = yaml_documents(text)
    for name, service in compose["services"].items():
        words = tuple(service.get("command", ("",)))
        if words[0] in _PROGRAMS:
            environment = {key: str(value) for key, value in service["environment"].items()}
            yield Invocation(f"compose.yaml:{name}", words, environment)


def _of_kubernetes() -> Iterator[Invocation]:
    """What a pod learns from its own fields, or from its controller, is `0` here."""
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml")):
        for pod in pods_in(yaml_documents(path.read_text())):
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                words = container.get("args") or container.get("command") or [""]
                if words[0] in _PROGRAMS:
                    environment = {entry["name"]: entry.get("value", "0") for entry in container.get("env", [])}
                    expanded = {name: _expanded(value) for name, value in environment.items()}
                    told = tuple(_expanded(word, "1") for word in words)
                    yield Invocation(f"{path.parent.name}/{path.name}", told, expanded)


def pods_in(manifest: Any) -> Iterator[dict[str, Any]]:
    """The specifications of pods in it, however deep: what has containers."""
    match manifest:
        case {"containers": _}:
            yield manifest
        case dict():
            for value in manifest.values():
                yield from pods_in(value)
        case list():
            for value in manifest:
                yield from pods_in(value)
        case _:
            pass


def _expanded(text: str, value: str = "0") -> str:
    return re.sub(r"\$\(\w+\)", value, text)


def _of_slurm() -> Iterator[Invocation]:
    """Managers read what the script sets."""
    text = (DEPLOY / "slurm" / "train.sbatch").read_text().replace("$((port + 1))", "1")
    exported = dict.fromkeys(re.findall(r"^ *(LIGHTHOUSE_\w+|REPLICA_GROUP_ID)=", text, re.MULTILINE), "1:1")
    for found in _of_text("train.sbatch", text):
        yield replace(found, environment=exported) if found.words[0] == "lighthouse-manager" else found


def _of_readme() -> Iterator[Invocation]:
    code = re.findall(r"^    (.*(?:\\\n.*)*)", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    for found in _of_text("README.md", "\n".join(code)):  # docker run -e LIGHTHOUSE_ADDRESS
        is_manager = found.words[0] == "lighthouse-manager"
        yield replace(found, environment={"LIGHTHOUSE_ADDRESS": "1:1"}) if is_manager else found


def _of_text(source: str, text: str) -> Iterator[Invocation]:
    """A program's name and its verb are a start of it; a variable of the shell counts as `1`."""
    plain = re.sub(r"\$\{[^}]*\}|\$\w+", "1", text.replace("\\\n", " "))
    for start in re.findall(r"(?<![\w/-])((?:lighthouse serve|lighthouse-manager (?:serve|run))\b[^\n&#`|]*)", plain):
        yield Invocation(source, tuple(shlex.split(start)))
