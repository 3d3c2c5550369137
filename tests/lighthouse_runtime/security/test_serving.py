import os
from pathlib import Path

import pytest

from lighthouse_runtime.security.serving import Serving, served_ports, write_serving_file


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user whose lighthouses have been started on these ports, one after another."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for second, port in enumerate((29510, 7, 65535, 443)):
        write_serving_file(port, Serving("", tmp_path))
        os.utime(next(tmp_path.rglob(f"serving-{port}.json")), (second, second))
    return tmp_path


def test_the_port_that_was_served_last_comes_first() -> None:
    assert served_ports() == (443, 65535, 7, 29510)


def test_one_that_serves_without_credentials_is_none_of_them() -> None:
    write_serving_file(443, None)
    assert served_ports() == (65535, 7, 29510)


def test_a_file_that_says_nothing_is_none_of_them(state: Path) -> None:
    next(state.rglob("serving-7.json")).write_text("{")
    assert served_ports() == (443, 65535, 29510)
