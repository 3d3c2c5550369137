from contextlib import ExitStack

import pytest

from tests.agent_client.healing.pair import Pair


@pytest.fixture
def pair(stack: ExitStack) -> Pair:
    return Pair(stack)
