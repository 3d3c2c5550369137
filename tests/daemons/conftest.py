"""Fixtures that several modules use: a lighthouse, one with its own PKI, and a second host."""

from collections.abc import Iterator

import pytest

from tests.daemons.elsewhere import Elsewhere, another_host
from tests.daemons.mutual_tls import Site
from tests.processes import Lighthouse


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse() as process:
        yield process


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("pki"))
    with site.lighthouse:
        yield site


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    with another_host() as host:
        yield host
