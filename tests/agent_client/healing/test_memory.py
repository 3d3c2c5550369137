"""What memory there is: the host's, or less where a control group says so."""

from pathlib import Path

import pytest

from agent_client.healing import memory

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
