"""The client against a real etcd."""

import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from lighthouse.store.etcd_client import (
    EtcdClient,
    LeaseGone,
    StoreUnavailable,
    after_prefix,
    delete,
    has_version,
    parse_etcd_address,
    put,
    read,
    touch,
    was_changed_at,
    was_made_at,
)
from tests.etcd_cluster import EtcdCluster, etcd_cluster, free_ports, needs_etcd

pytestmark = needs_etcd
KEY = b"/k/\xc3\xbc"


@pytest.fixture
async def client(etcd: EtcdCluster) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(parse_etcd_address(etcd.store()))
    await client.open()
    yield client
    await client.close()


async def test_a_guarded_write_is_all_or_nothing(client: EtcdClient) -> None:
    key, beside = uuid.uuid4().bytes, uuid.uuid4().bytes
    made = await client.transact([was_made_at(key, 0)], [put(key, b"1"), put(beside, b"x")], [], 5)
    assert made.succeeded
    again = await client.transact([was_made_at(key, 0)], [put(beside, b"y")], [read(key)], 5)
    assert not again.succeeded
    [[found]] = again.reads
    assert (found.value, found.version, found.create_revision) == (b"1", 1, made.revision)
    touched = await client.transact([has_version(key, 1)], [touch(key)], [], 5)
    assert touched.succeeded
    [found] = await client.read(key, None, 5)
    assert (found.value, found.version, found.create_revision) == (b"1", 2, made.revision)
    [found] = await client.read(beside, None, 5)
    assert found.value == b"x"
    deleted = await client.transact([was_changed_at(key, touched.revision)], [delete(key)], [], 5)
    assert deleted.succeeded
    assert await client.read(key, None, 5) == ()


async def test_a_range_has_all_that_begins_with_the_prefix(client: EtcdClient) -> None:
    prefix = uuid.uuid4().hex.encode() + b"/"
    writes = [put(prefix + name, name) for name in (b"a", b"b/\xff", b"")]
    await client.transact([], [*writes, put(prefix[:-1] + b"0", b"no")], [], 5)
    found = await client.read(prefix, after_prefix(prefix), 5)
    assert [kv.value for kv in found] == [b"", b"a", b"b/\xff"]
    await client.transact([], [delete(prefix, after_prefix(prefix))], [], 5)
    assert await client.read(prefix, after_prefix(prefix), 5) == ()


async def test_a_key_goes_with_its_lease(client: EtcdClient) -> None:
    key = uuid.uuid4().bytes
    lease = await client.grant(5, 5)
    assert lease.ttl_s == 5
    await client.transact([], [put(key, b"x", lease.id)], [], 5)
    assert await client.renew(lease.id, 5) == 5
    [found] = await client.read(key, None, 5)
    assert found.lease == lease.id
    await client.revoke(lease.id, 5)
    assert await client.read(key, None, 5) == ()
    await client.revoke(lease.id, 5)
    with pytest.raises(LeaseGone):
        await client.renew(lease.id, 5)
    with pytest.raises(LeaseGone):
        await client.transact([], [put(key, b"x", lease.id)], [], 5)


async def test_what_is_no_etcd_is_named(etcd: EtcdCluster) -> None:
    [port] = free_ports(1)
    client = EtcdClient(parse_etcd_address(f"etcd://127.0.0.1:{port}"))
    await client.open()
    with pytest.raises(StoreUnavailable, match=rf"^etcd at 127\.0\.0\.1:{port}: .*refused|Connect call failed"):
        await client.read(KEY, None, 5)
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(StoreUnavailable, match=rf"^etcd at 127\.0\.0\.1:{port}: no answer within 0\.2 s"):
            await client.read(KEY, None, 0.2)
    await client.close()


@pytest.fixture
def own() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


async def test_the_next_call_asks_another_endpoint_and_without_a_quorum_none_answers(own: EtcdCluster) -> None:
    client = EtcdClient(parse_etcd_address(own.store()))
    await client.open()
    own.nodes[0].kill()
    with pytest.raises(StoreUnavailable):
        await client.read(KEY, None, 2)
    until = time.monotonic() + 30
    while True:  # until etcd has elected a leader
        try:
            await client.read(KEY, None, 2)
            break
        except StoreUnavailable:
            assert time.monotonic() < until
    own.nodes[1].kill()
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await client.read(KEY, None, 0.5)
    await client.close()
