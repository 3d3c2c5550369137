from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.agent_client.healing.pair import Pair
from tests.agent_client.healing.sources import threads
from tests.processes import eventually


@pytest.fixture
def pair(stack: ExitStack) -> Pair:
    return Pair(stack)


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    """The end of the test ends all threads of our sources."""
    yield
    assert eventually(lambda: not threads()), threads()
