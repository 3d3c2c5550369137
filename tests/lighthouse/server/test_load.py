"""Whether the lighthouse's host is busy, on hosts that hide it."""

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lighthouse.server import daemon


def test_a_host_that_hides_its_load_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under our systemd unit (ProcSubset=pid), where an older C library reads the same file as we do."""

    def hide(*_: Any, **__: Any) -> NoReturn:
        raise OSError("Load averages are unobtainable")

    monkeypatch.setattr(Path, "read_text", hide)
    monkeypatch.setattr(os, "getloadavg", hide)
    assert not daemon._is_busy()  # pyright: ignore[reportPrivateUsage]
