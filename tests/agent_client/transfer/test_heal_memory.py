"""Healing takes 1.05 x the state on the target; on the source next to nothing, or 1.05 x with a snapshot."""

import pytest

from tests.agent_client.ranks import Rank, Start

SIZE_BYTES = 256 * 2**20
ACTOR = "tests.agent_client.memory_actor:MemoryActor"


def heal(source: Rank, target: Rank, value: float) -> tuple[int, int]:
    """What it took at the highest, in bytes, (of the source, of the target)."""
    source.call("do", "mark", value=value)
    target.call("do", "mark", value=-value)
    served = source.call("do", "serve")
    target.call("do", "heal", address=served["address"], value=value)
    source.call("do", "release")
    return source.call("do", "extra_bytes"), target.call("do", "extra_bytes")


@pytest.mark.parametrize(("kind", "source_at_most"), [("hold", 64 * 2**20), ("snapshot", 1.05 * SIZE_BYTES)])
def test_what_it_takes(start: Start, kind: str, source_at_most: float) -> None:
    sides = start(2, ACTOR)
    for side in sides:
        side.call("build", kind, SIZE_BYTES)
    heal(*sides, value=1.0)  # what is loaded when first used
    source_bytes, target_bytes = heal(*sides, value=2.0)
    assert source_bytes <= source_at_most
    assert 0.9 * SIZE_BYTES <= target_bytes <= 1.05 * SIZE_BYTES, "a measurement that sees nothing proves nothing"
