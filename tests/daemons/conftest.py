"""One lighthouse for all tests of a module that change nothing for the others."""

from collections.abc import Iterator

import pytest

from tests.processes import Lighthouse


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse() as process:
        yield process
