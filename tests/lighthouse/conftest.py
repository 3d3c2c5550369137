from collections.abc import Iterator

import pytest

from tests.etcd_cluster import EtcdCluster, etcd_cluster
from tests.virtual_loop import VirtualLoop


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdCluster]:
    """Shared: each test takes a prefix of its own."""
    with etcd_cluster() as cluster:
        yield cluster
