"""Type the `console` blocks of a page into shells, and compare their output with the page.

    python -m tests.docs.console docs/tutorials/first-run.md

A block's title names its terminal, and "node-2: ..." a terminal of a second host. Blocks without a title share one.
`$ ` starts a command. The lines below it are its complete output, except that a line `...` stands for any number of
lines. `...` at the end also accepts a command that keeps running. A block without a command shows more output of the
command that runs in its terminal. Queries such as `lighthouse status` repeat until their output matches.

Times, sizes and numbers of several digits match any others. An ID matches any ID at its first place, and only the same
ID at later places. Run this under `isolated`, which gives a page its own network, host name and processes.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ROOT, clean_environment

WITHIN_S = 120.0
_BLOCK = re.compile(r'^```console(?: title="(?P<terminal>[^"]+)")?\n(?P<body>.*?)^```$', re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.MULTILINE)
_QUERY = re.compile(r"lighthouse (status|members|ranks|runs|incidents?|stacks)\b")
_TOKENS = {
    "rank": r"\b[a-z]\w*/\d+(?:-\d+)?\b",
    "id": r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,}\b|\blhj_[\w-]+",
    "size": r"\b(?:\d+(?:\.\d+)?(?:ms|us|s|m|h|d)\s?)+\b",
    "number": r"-?\d[\d.,:TZ-]+\b|(?<=\D)\d{2,}",
    "any": r"\.\.\.",
    "space": r"\s+",
}
_TOKEN = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _TOKENS.items()))
_MATCHES = {"size": r"(?:[\d.]+(?:ms|us|s|m|h|d)\s?)+", "number": r"-?\d[\d.,:TZ-]*", "any": r".*", "space": r"\s+"}


def isolated(*command: str) -> list[str]:
    """`command` with its own loopback, host name, process ids and mounts, which end with it. Needs root."""
    namespaces = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    return ["unshare", *namespaces, "sh", "-c", 'ip link set lo up && hostname node-1 && exec "$@"', "sh", *command]


@dataclass(frozen=True)
class Step:
    terminal: str
    command: str | None
    shown: str


def steps(text: str) -> Iterator[Step]:
    for block in _BLOCK.finditer(text):
        before, *pairs = _COMMAND.split(block["body"])
        if before:
            yield Step(block["terminal"] or "", None, before)
        for command, shown in zip(pairs[::2], pairs[1::2], strict=True):
            yield Step(block["terminal"] or "", command, shown)


def expression(shown: str, ids: dict[str, str]) -> str:
    """A regular expression for what the page shows. `ids`: the page's IDs, and what they are in this run."""
    return "".join(_any_lines() if line == "..." else _line(line, ids) for line in shown.splitlines())


def _any_lines() -> str:
    return r"(?:.*\n)*?"


def _line(line: str, ids: dict[str, str]) -> str:
    parts, at = [r"\s*"], 0
    for token in _TOKEN.finditer(line := line.strip()):
        parts.append(re.escape(line[at : token.start()]))
        parts.append(_id(token[0], ids) if token.lastgroup == "id" else _MATCHES.get(str(token.lastgroup), token[0]))
        at = token.end()
    return "".join([*parts, re.escape(line[at:]), r"\s*\n"])


def _id(shown: str, ids: dict[str, str]) -> str:
    if shown not in ids:
        ids[shown] = ""
        return rf"(?P<id_{len(ids) - 1}>\w[\w-]*)"
    return re.escape(ids[shown]) or rf"(?P=id_{list(ids).index(shown)})"


class Terminal:
    def __init__(self, prefix: list[str], folder: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with this process
        options = {"stdout": self._log, "stderr": self._log, "cwd": folder, "env": environment(folder), "text": True}
        self._shell = subprocess.Popen([*prefix, "bash"], stdin=subprocess.PIPE, **options)
        self.at, self._count = 0, 0

    def type(self, command: str) -> None:
        self.at, self._count = len(self._text()), self._count + 1
        assert self._shell.stdin
        self._shell.stdin.write(f"{{ {command}\n}} < /dev/null\necho {self._end}\n")
        self._shell.stdin.flush()

    @property
    def _end(self) -> str:
        return f"end-of-command-{self._count}"

    def _text(self) -> str:
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def output(self) -> tuple[str, bool]:
        """What it has printed since `at`, and whether the command has ended."""
        text, end, _ = self._text()[self.at :].partition(f"{self._end}\n")
        return text, bool(end)


class Mismatch(Exception):
    """The output of a step differs from the page."""


class Reader:
    """Someone who follows a page in `folder`, with a second host behind a cable if the page names one."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder, self._ids, self._terminals = folder, dict[str, str](), dict[str, Terminal]()
        self._enter = {"node-1": list[str](), "node-2": second_host() if "node-2" in text else []}
        for host in self._enter:
            (folder / host).mkdir()
            (folder / host / "examples").symlink_to(ROOT / "examples")

    def do(self, step: Step) -> None:
        terminal = self._terminal(step.terminal)
        ends_at, is_open = time.monotonic() + WITHIN_S, step.shown.endswith("...\n") or step.command is None
        if step.command is not None:
            terminal.type(step.command)
        while True:
            output, has_ended = terminal.output()
            ids = dict(self._ids)
            wanted = expression(step.shown, ids)
            found = re.match(wanted if is_open else rf"{wanted}\Z", output)
            if found and (has_ended or is_open):
                names = list(ids)
                self._ids = ids | {names[int(name[3:])]: value for name, value in found.groupdict().items()}
                terminal.at += found.end() if is_open else 0
                return
            if time.monotonic() > ends_at or (has_ended and not _QUERY.match(step.command or "")):
                raise Mismatch(f"{step.terminal}\n$ {step.command}\nshown:\n{step.shown}\nprinted:\n{output}")
            time.sleep(0.2)
            if has_ended:
                terminal.type(step.command or "")

    def _terminal(self, name: str) -> Terminal:
        if name not in self._terminals:
            host = "node-2" if name.startswith("node-2") else "node-1"
            self._terminals[name] = Terminal(self._enter[host], self._folder / host)
        return self._terminals[name]


def environment(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return clean_environment(HOME=str(home), XDG_STATE_HOME=str(home / "state"), COLUMNS="80", PATH=path)


def second_host() -> list[str]:
    """Make node-2 at the other end of a cable; return what runs a command on it."""
    sleep = ["unshare", "--net", "--uts", "sh", "-c", "hostname node-2 && echo && exec sleep inf"]
    host = subprocess.Popen(sleep, stdout=subprocess.PIPE)
    assert host.stdout is not None
    host.stdout.readline()
    enter = f"nsenter --net --uts --target {host.pid}"
    connect = f"""
        ip link add eth0 type veth peer name eth0 netns {host.pid}
        ip addr add 10.0.0.1/24 dev eth0 && ip link set eth0 up
        {enter} sh -c "ip link set lo up && ip addr add 10.0.0.2/24 dev eth0 && ip link set eth0 up"
    """
    subprocess.run(["sh", "-ec", connect], check=True)
    return enter.split()


def main(page: str) -> None:
    text = Path(page).read_text()
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(Path(folder), text)
        for step in steps(text):
            reader.do(step)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Mismatch as e:
        sys.exit(str(e))
