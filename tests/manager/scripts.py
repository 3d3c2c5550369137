"""Paragraphs of lines that begin a script, or are told to it; what follows from each stands indented below it."""

from collections.abc import Callable
from typing import Protocol


class Script(Protocol):
    def tell(self, line: str) -> list[str]:
        """What follows, as lines."""
        ...


def player(begin: Callable[[str], Script | None]) -> Callable[[str], str]:
    """Gives a paragraph with what is so. `begin`: the script that a line begins; None: the present one is told."""

    def play(paragraph: str) -> str:
        lines: list[str] = []
        script: Script | None = None
        for line in paragraph.splitlines():
            if line.startswith("    "):
                continue
            lines.append(line)
            if line.startswith("#"):
                continue
            if begun := begin(line):
                script = begun
            else:
                assert script is not None
                lines += [f"    {each}" for each in script.tell(line)]
        return "\n".join(lines)

    return play
