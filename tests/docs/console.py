"""Type the `console` blocks of a page into shells, and compare their output with the page.

    python -m tests.docs.console docs/tutorials/first-run.md SECONDS

A block's title names its terminal, and "node-2: ..." a terminal of a second host. Blocks without a title share one.
`$ ` starts a command. The lines below it are its complete output, except that a line `...` stands for any number of
lines. `...` at the end also accepts a command that keeps running. A block without a command shows more output of the
command that runs in its terminal. Queries such as `lighthouse status` repeat until their output matches.

Times, sizes and numbers of several digits match any others, except a number that was an argument of a command. An ID
matches any ID at its first place, and only the same ID at later places. REWRITE_DOCS=1 replaces output that differs.
Run this under `isolated`, which gives a page its own network, host name and processes.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.processes import ROOT, clean_environment

_BLOCK = re.compile(r'^```console(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.MULTILINE)
LAST_LINES = 20
"""Lines of each terminal in the report of a difference."""
_QUERY = re.compile(r"lighthouse (status|members|ranks|runs|incidents?|stacks)\b")
_TOKENS = {  # how a token looks on the page, and what it matches; None: itself
    "rank": (r"\b[a-z][\w-]*/\d+(?:-\d+)?\b", None),
    "id": (r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b|\blhj_[\w-]+|(?<=weights )-?[\d.]+", None),
    "size": (r"\b(?:\d+(?:\.\d+)?(?:ms|us|s|m|h|d)\s?)+\b", r"(?:[\d.]+(?:ms|us|s|m|h|d)\s?)+"),
    "number": (r"-?\d[\d.,:TZ-]+\b", r"-?\d[\d.,:TZ-]*"),
    "address": (r"0x[0-9a-f]+", r"0x[0-9a-f]+"),
    "any": (r"\.\.\.", r".*"),
    "space": (r"\s+", r"\s+"),
}
_TOKEN = re.compile("|".join(f"(?P<{name}>{shown})" for name, (shown, _) in _TOKENS.items()))


class Step(NamedTuple):
    terminal: str
    command: str
    """Empty if the step only looks at the output of an earlier command."""
    shown: str


class Mismatch(Exception):
    """The output of a step differs from the page."""


def steps(text: str) -> Iterator[Step]:
    for terminal, body in _BLOCK.findall(text):
        before, *pairs = _COMMAND.split(body)
        if before:
            yield Step(terminal, "", before)
        yield from (Step(terminal, *pair) for pair in zip(pairs[::2], pairs[1::2], strict=True))


def expression(shown: str, ids: dict[str, str], typed: set[str]) -> str:
    """Return a regular expression for `shown`.

    Args:
        shown: Lines of the page.
        ids: IDs of the page, with their values in this run.
        typed: Numbers that match only themselves: those in commands.
    """
    return "".join(r"(?:.*\n)*?" if line == "..." else _line(line.strip(), ids, typed) for line in shown.splitlines())


def _line(line: str, ids: dict[str, str], typed: set[str]) -> str:
    parts, at = [r"\s*"], 0
    for token in _TOKEN.finditer(line):
        kind = str(token.lastgroup)
        itself = re.escape(token[0])
        matches = _id(token[0], ids) if kind == "id" else itself if token[0] in typed else _TOKENS[kind][1] or itself
        parts += [re.escape(line[at : token.start()]), matches]
        at = token.end()
    return "".join([*parts, re.escape(line[at:]), r"[^\S\n]*\n"])


def _id(shown: str, ids: dict[str, str]) -> str:
    if shown not in ids:
        ids[shown] = ""
        return rf"(?P<id_{len(ids) - 1}>-?\w[\w.-]*)"
    return re.escape(ids[shown]) or rf"(?P=id_{list(ids).index(shown)})"


class Terminal:
    """A shell of a host. `enter` is the command in front of one that runs there, `home` the user's folder."""

    def __init__(self, enter: list[str], home: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - the runner's process closes it
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = clean_environment(HOME=str(home), XDG_STATE_HOME=str(home / "state"), COLUMNS="80", PATH=path)
        output = {"stdout": self._log, "stderr": self._log}
        self._shell = subprocess.Popen([*enter, "bash"], stdin=subprocess.PIPE, text=True, cwd=home, env=env, **output)
        self.at = self._count = 0

    def type(self, command: str) -> None:
        self.at, self._count = len(self._text()), self._count + 1
        print(f"{{ {command}\n}} < /dev/null\necho end-of-command-{self._count}", file=self._shell.stdin, flush=True)

    def output(self) -> tuple[str, bool]:
        """Return what it has printed since `at`, and whether the command has ended."""
        text, end, _ = self._text()[self.at :].partition(f"end-of-command-{self._count}\n")
        return text, bool(end)

    def last_lines(self) -> str:
        return "\n".join(self._text().splitlines()[-LAST_LINES:])

    def _text(self) -> str:
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")


class Reader:
    """Follows a page with `folder` as a place for the users' homes."""

    def __init__(self, text: str, folder: Path) -> None:
        self._ids, self._typed, self._terminals = dict[str, str](), set[str](), dict[str, Terminal]()
        self._hosts = {"node-1": list[str]()} | ({"node-2": _second_host()} if "node-2: " in text else {})
        self._homes = {host: folder / host for host in self._hosts}
        for home in self._homes.values():
            home.mkdir()
            (home / "examples").symlink_to(ROOT / "examples")

    def do(self, step: Step, within_s: float) -> str:
        """Return the output. Raise Mismatch unless it matches in time."""
        host = "node-2" if step.terminal.startswith("node-2: ") else "node-1"
        if step.terminal not in self._terminals:
            self._terminals[step.terminal] = Terminal(self._hosts[host], self._homes[host])
        terminal, ends_at = self._terminals[step.terminal], time.monotonic() + within_s
        command = re.sub("|".join(map(re.escape, self._ids)) or "$^", lambda match: self._ids[match[0]], step.command)
        may_run = step.shown.endswith("...\n") or not command
        last = ""
        if command:
            terminal.type(command)
            self._typed |= set(re.findall(r"(?<!\S)\d+(?!\S)", command))
        while True:
            output, has_ended = terminal.output()
            last = output if has_ended or not last else last
            ids = dict(self._ids)
            found = re.match(expression(step.shown, ids, self._typed) + ("" if may_run else r"\Z"), output)
            if found and (has_ended or (may_run and not _QUERY.match(command))):
                names = list(ids)
                self._ids = ids | {names[int(name[3:])]: value for name, value in found.groupdict().items()}
                terminal.at += found.end() if may_run else 0
                return output
            repeats = has_ended and _QUERY.match(command)
            if time.monotonic() > ends_at or (has_ended and not repeats):
                raise Mismatch(step.terminal, command, step.shown, last)
            time.sleep(0.2)
            if repeats:
                terminal.type(command)

    def last_lines(self) -> str:
        """Return what each terminal shows, to find out why an output never came."""
        return "\n".join(f"--- {title}\n{terminal.last_lines()}" for title, terminal in self._terminals.items())


def isolated(*command: str) -> list[str]:
    """Return `command` with its own loopback, host name and process ids, which end with it. Needs root."""
    namespaces = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    hosts = "f=$(mktemp) && echo 127.0.0.1 localhost node-1 > $f && mount --bind $f /etc/hosts && rm $f"
    prepare = f'ip link set lo up && hostname node-1 && {hosts} && exec "$@"'
    return ["unshare", *namespaces, "sh", "-c", prepare, "sh", *command]


def _second_host() -> list[str]:
    """Make node-2 at the other end of a cable; return what runs a command there."""
    sleep = ["unshare", "--net", "--uts", "sh", "-c", "hostname node-2 && echo && exec sleep inf"]
    host = subprocess.Popen(sleep, stdout=subprocess.PIPE)
    (host.stdout or sys.stdin).readline()
    enter = f"nsenter --net --uts --target {host.pid}"
    connect = f"""ip link add eth0 type veth peer name eth0 netns {host.pid}
        ip addr add 10.0.0.1/24 dev eth0 && ip link set eth0 up
        {enter} sh -c "ip link set lo up && ip addr add 10.0.0.2/24 dev eth0 && ip link set eth0 up" """
    subprocess.run(["sh", "-ec", connect], check=True)
    return enter.split()


def main(page: str, within_s: str) -> None:
    text = Path(page).read_text()
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(text, Path(folder))
        for step in steps(text):
            try:
                print(f"{step.terminal}\n$ {step.command}\n{reader.do(step, float(within_s))}", flush=True)
            except Mismatch as e:
                terminal, command, shown, output = e.args
                if not (os.environ.get("REWRITE_DOCS") and command and output):
                    sys.exit(f"{terminal}\n$ {command}\nthe page:\n{shown}\nthis run:\n{output}\n{reader.last_lines()}")
                text = text.replace(f"$ {step.command}\n{shown}", f"$ {step.command}\n{output}", 1)
                Path(page).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
