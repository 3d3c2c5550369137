"""The prose of each wing only gets better."""

import pytest

from tests.docs.pages import REPOSITORY
from tests.docs.prose import flags, flags_per_1000_words, paragraphs

# Flags per 1,000 words. Lower a number after a rewrite; never raise one. The goal is 8 everywhere.
CEILINGS = {
    "lighthouse_protocol": 1,
    "lighthouse_runtime": 2,
    "lighthouse": 3,
    "manager": 3,
    "agent_client": 3,
    "benchmarks": 3,
    "examples": 8,
    "tests": 33,
}


@pytest.mark.parametrize("wing", CEILINGS)
def test_prose_does_not_get_worse(wing: str) -> None:
    measured = flags_per_1000_words(REPOSITORY / wing)
    assert measured <= CEILINGS[wing], f"{wing} has {measured:.1f} flags per 1,000 words (tests/docs/prose.py)"


@pytest.mark.parametrize(
    "text",
    [
        "None: not by this way.",
        "The rank is told of the loss.",
        "Whether all holders have done it.",
        "The others are gone, nobody waits.",
        "At most so much per request.",
    ],
)
def test_a_pattern_is_found(text: str) -> None:
    assert flags(text)


def test_plain_prose_has_no_flags() -> None:
    assert not flags("Send the generation to every slot except those with finished ranks. Return None if it is empty.")


def test_paragraphs_join_lines_and_skip_code() -> None:
    source = '"""Do one thing\nwith two lines."""\n\nx = 1  # a unit that matters here\ny = "short"\n'
    assert list(paragraphs(source)) == ["Do one thing with two lines.", "a unit that matters here"]
