"""How much memory there is, and how much of it a heal takes."""

from pathlib import Path

import pytest

from agent_client.healing import healing as memory
from tests.agent_client.ranks import Rank, Start

GIB = 2**30


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """64 GiB available, in the group /job/task of cgroup v2, of which none has a limit."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * 2**20} kB\nHugePages_Total: 0\n")
    (tmp_path / "cgroup").write_text("0::/job/task\n")
    (tmp_path / "groups/job/task").mkdir(parents=True)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "groups")
    return tmp_path


def limit(folder: Path, limit_bytes: object, used_bytes: int, cache_bytes: int = 0) -> None:
    (folder / "memory.max").write_text(f"{limit_bytes}\n")
    (folder / "memory.current").write_text(f"{used_bytes}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache_bytes}\n")


def test_of_the_host(host: Path) -> None:
    assert memory.available_bytes() == 64 * GIB


def test_of_the_tightest_group(host: Path) -> None:
    limit(host / "groups/job/task", "max", 5 * GIB)
    limit(host / "groups/job", 8 * GIB, 5 * GIB, cache_bytes=GIB)
    assert memory.available_bytes() == 4 * GIB
    limit(host / "groups/job/task", 6 * GIB, 5 * GIB)
    assert memory.available_bytes() == GIB


def test_of_a_container_whose_own_group_is_the_root(host: Path) -> None:
    (host / "cgroup").write_text("0::/\n")
    limit(host / "groups", 2 * GIB, 3 * GIB)
    assert memory.available_bytes() == 0


def test_without_cgroup_v2(host: Path) -> None:
    (host / "cgroup").write_text("4:memory:/job\n")
    assert memory.available_bytes() == 64 * GIB


def test_here() -> None:
    assert 0 < memory.available_bytes() < 2**60


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
