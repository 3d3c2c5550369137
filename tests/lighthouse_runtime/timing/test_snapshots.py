"""A view is built for each asker where it is cheap, and else for all."""

import pytest

from lighthouse_runtime.timing import pacing
from lighthouse_runtime.timing.pacing import CHEAP_S, LOOP_SHARE, Snapshots


class Builder:
    """Each view takes `cost_s`, and is numbered."""

    def __init__(self, cost_s: float) -> None:
        self.now = 100.0
        self.cost_s = cost_s
        self.built = 0
        self.views = Snapshots(self.build, lambda: self.now)

    def build(self, key: str) -> str:
        self.now += self.cost_s
        self.built += 1
        if key == "bad":
            raise ValueError(key)
        return f"{key}{self.built}"


def test_what_is_cheap_is_never_old():
    builder = Builder(CHEAP_S / 2)
    assert [builder.views.get("a") for _ in range(3)] == ["a1", "a2", "a3"]


def test_what_costs_much_takes_its_share_of_the_time_however_many_ask():
    builder = Builder(0.1)
    began_at = builder.now
    while builder.now < began_at + 100.0:
        builder.views.get("a")
        builder.now += 0.001
    assert builder.built * builder.cost_s <= 1.01 * LOOP_SHARE * (builder.now - began_at) + builder.cost_s
    assert builder.built > 10


def test_each_key_has_a_view_of_its_own_and_few_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pacing, "MAX_KEPT", 2)
    builder = Builder(0.1)
    assert [builder.views.get(key) for key in "aba"] == ["a1", "b2", "a1"]
    builder.views.get("c")
    assert len(builder.views._kept) == 2


def test_a_failure_is_not_kept():
    builder = Builder(0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            builder.views.get("bad")
    assert builder.built == 2
