"""A command that runs Python, cut where its script or module begins. No I/O."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?")
_FLAGS = frozenset("bBdEIOPqsSuv")
_WITH_VALUE = frozenset("WX")


class NoPython(ValueError):
    """The message says what the command is instead."""


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """`interpreter`: the program and its own options. `program`: a script or `-m` and a module, and their arguments."""

    interpreter: tuple[str, ...]
    program: tuple[str, ...]


def read_python(command: Sequence[str]) -> PythonCommand:
    """Raises NoPython."""
    if not _INTERPRETER.fullmatch(command[0].rpartition("/")[2]):
        raise NoPython(f"{command[0]} is not a Python interpreter")
    words = list(command[1:])
    own = [command[0]]
    while words and words[0].startswith("-") and words[0] != "-":
        taken, module = _option(words)
        if module is not None:
            flags = [f"-{module.flags}"] if module.flags else []
            return PythonCommand((*own, *flags), ("-m", module.name, *words[taken:]))
        own += words[:taken]
        words = words[taken:]
    if not words or words[0] == "-":
        raise NoPython(f"{command[0]} has neither a script nor -m MODULE")
    return PythonCommand(tuple(own), tuple(words))


@dataclass(frozen=True, slots=True)
class _Module:
    """`flags` stand before the m in the same word, as in -um."""

    name: str
    flags: str


def _option(words: Sequence[str]) -> tuple[int, _Module | None]:
    """How many words the first option takes, and the module that it names."""
    letters = words[0][1:]
    for index, letter in enumerate(letters):
        rest = letters[index + 1 :]
        taken = 1 if rest else 2
        if letter in _FLAGS:
            continue
        if letter not in _WITH_VALUE | {"m"}:
            raise NoPython(f"the interpreter's option {words[0]} is not possible here")
        if taken > len(words):
            raise NoPython(f"{words[0]} lacks its value")
        if letter == "m":
            return taken, _Module(rest or words[1], letters[:index])
        return taken, None
    return 1, None
