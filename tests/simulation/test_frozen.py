"""What the machines send in drawn runs is what was frozen (frozen.py)."""

import subprocess
import sys

import pytest

from tests.simulation.frozen import KINDS, digest


@pytest.mark.parametrize("kind", KINDS)
def test_the_machines_send_what_was_frozen(kind: str) -> None:
    words = [sys.executable, "-m", "tests.simulation.frozen", "--kind", kind, "--seeds", "0:6"]
    assert subprocess.run(words, check=False, capture_output=True, text=True).stdout == f"{kind}: 6 seeds, 0 differ\n"


def test_a_message_more_less_or_other_is_seen() -> None:
    sent = [("a", "b", "join"), ("b", "a", "quorum 1"), ("a", "b", "vote"), ("b", "a", "commit")]
    others = [sent[:-1], [*sent, sent[0]], [*sent[:-1], ("b", "a", "discard")], [*sent[:-1], ("b", "c", "commit")]]
    assert digest(sent) not in map(digest, others)
    assert digest(sent) == digest(sorted(sent, key=lambda each: each[0])), "each stream has an order of its own"
    assert digest(sent) != digest(sent[::-1])
