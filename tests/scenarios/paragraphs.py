"""Scenarios as the paragraphs of one file, each played by itself."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def scenarios_of(file: Path, play: Callable[[str], str]) -> pytest.MarkDecorator:
    """A parametrization by the paragraphs of `file`, named by their first lines; `play` gives one with what is so.

    REWRITE_SCENARIOS=1 writes that into the file; then read the diff.
    """
    paragraphs = file.read_text().rstrip("\n").split("\n\n")
    if os.environ.get("REWRITE_SCENARIOS"):
        paragraphs = [play(paragraph) for paragraph in paragraphs]
        file.write_text("\n\n".join(paragraphs) + "\n")
    titles = [paragraph.partition("\n")[0].removeprefix("# ") for paragraph in paragraphs]
    return pytest.mark.parametrize("paragraph", paragraphs, ids=titles)
