import pytest

from tests.virtual_loop import VirtualLoop


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()
