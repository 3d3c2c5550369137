"""The servers are child processes of pytest's own: they find this source tree where no wheel is installed."""

import pytest

from tests.processes import ROOT


@pytest.fixture(autouse=True)
def _children_find_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
