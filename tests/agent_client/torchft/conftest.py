"""The servers are child processes of pytest's own: they find this source tree where no wheel is installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent_client.ranks import Rank, RankServer
from tests.processes import ROOT
from tests.torchft.stock import require


@pytest.fixture(autouse=True)
def _children_find_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def script(rank_server: RankServer, tmp_path: Path) -> Iterator[Rank]:
    """A process that has torch imported, and not torchft."""
    require()
    with rank_server.start("tests.agent_client.torchft.scripts:Script", tmp_path / "log") as rank:
        yield rank
