"""One process with torchft's module for all tests of a module: its clients hold nothing between tests."""

from collections.abc import Iterator

import pytest

from tests.torchft.stock import StockTorchft, require


@pytest.fixture(scope="module")
def stock() -> Iterator[StockTorchft]:
    require()
    with StockTorchft() as process:
        yield process
