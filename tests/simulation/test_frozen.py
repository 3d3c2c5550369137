"""Digests of messages: what counts as a difference, and how digests are stored."""

from tests.simulation.frozen import FOLDER, digest, load, save
from tests.simulation.simulators import SIMULATORS

SENT = [("a", "b", "join"), ("b", "a", "quorum 1"), ("a", "b", "vote"), ("b", "a", "commit")]


def test_a_missing_additional_or_other_message_is_a_difference() -> None:
    others = [SENT[:-1], [*SENT, SENT[0]], [*SENT[:-1], ("b", "a", "discard")], [*SENT[:-1], ("b", "c", "commit")]]
    assert digest(SENT) not in map(digest, others)
    assert digest(SENT) == digest(sorted(SENT, key=lambda each: each[0])), "each stream has an order of its own"
    assert digest(SENT) != digest(SENT[::-1])


def test_both_simulators_have_frozen_seeds(monkeypatch, tmp_path) -> None:
    frozen = {name: load(name) for name in SIMULATORS}
    assert min(len(digests) for digests in frozen.values()) >= 700
    monkeypatch.setattr("tests.simulation.frozen.FOLDER", tmp_path)
    for name, digests in frozen.items():
        save(name, digests)
        assert (tmp_path / f"{name}.txt").read_text() == (FOLDER / f"{name}.txt").read_text()
