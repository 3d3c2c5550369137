"""Ranks as real processes, that end with their test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.agent_client.ranks import Rank, RankServer

Start = Callable[[int, str], list[Rank]]


@pytest.fixture
def start(rank_server: RankServer) -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda count, actor: [stack.enter_context(rank_server.start(actor)) for _ in range(count)]
