"""Healing takes 1.05 x the state on the target; on the source next to nothing, or 1.05 x with a snapshot."""

import pytest

from tests.agent_client.ranks import Rank, Start

SIZE_BYTES = 256 * 2**20
ACTOR = "tests.agent_client.memory_actor:MemoryActor"


def heal(*sides: Rank, value: float) -> tuple[int, ...]:
    """What it took at the highest, in bytes, of each of the sources and of the target, which is the last."""
    *sources, target = sides
    for source in sources:
        source.call("do", "mark", value=value)
    target.call("do", "mark", value=-value)
    addresses = [source.call("do", "serve")["address"] for source in sources]
    target.call("do", "heal", address=" ".join(addresses), value=value)
    for source in sources:
        source.call("do", "release")
    return tuple(side.call("do", "extra_bytes") for side in sides)


@pytest.mark.parametrize(("kind", "source_at_most"), [("hold", 64 * 2**20), ("snapshot", 1.05 * SIZE_BYTES)])
def test_what_it_takes(start: Start, kind: str, source_at_most: float) -> None:
    sides = start(2, ACTOR)
    for side in sides:
        side.call("build", kind, SIZE_BYTES)
    heal(*sides, value=1.0)  # what is loaded when first used
    source_bytes, target_bytes = heal(*sides, value=2.0)
    assert source_bytes <= source_at_most
    assert 0.9 * SIZE_BYTES <= target_bytes <= 1.05 * SIZE_BYTES, "a measurement that sees nothing proves nothing"


def test_from_two_sources_it_takes_no_more(start: Start) -> None:
    sides = start(3, ACTOR)
    for side in sides:
        side.call("build", "hold", SIZE_BYTES)
    heal(*sides, value=1.0)
    *sources_bytes, target_bytes = heal(*sides, value=2.0)
    assert max(sources_bytes) <= 64 * 2**20
    assert 0.9 * SIZE_BYTES <= target_bytes <= 1.1 * SIZE_BYTES
