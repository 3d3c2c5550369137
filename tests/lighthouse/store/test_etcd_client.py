"""The client against a real etcd: addresses, transactions, TLS and users."""

import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from lighthouse.store.etcd_client import (
    EtcdClient,
    LeaseGone,
    StoreCredentials,
    StoreUnavailable,
    delete,
    has_version,
    parse_etcd_address,
    put,
    read,
    touch,
    was_changed_at,
    was_made_at,
)
from lighthouse.store.records import after_prefix
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_runtime.process import files
from tests.etcd_cluster import EtcdCluster, etcd_cluster, free_ports, needs_etcd

KEY = b"/k/\xc3\xbc"
ANONYMOUS = StoreCredentials()


@asynccontextmanager
async def opened(store: str, credentials: StoreCredentials = ANONYMOUS) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(parse_etcd_address(store), credentials.tls(), credentials.user())
    await client.open()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
async def client(etcd: EtcdCluster) -> AsyncIterator[EtcdClient]:
    async with opened(etcd.store()) as client:
        yield client


@needs_etcd
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


@needs_etcd
async def test_a_range_has_all_that_begins_with_the_prefix(client: EtcdClient) -> None:
    prefix = uuid.uuid4().hex.encode() + b"/"
    writes = [put(prefix + name, name) for name in (b"a", b"b/\xff", b"")]
    await client.transact([], [*writes, put(prefix[:-1] + b"0", b"no")], [], 5)
    found = await client.read(prefix, after_prefix(prefix), 5)
    assert [kv.value for kv in found] == [b"", b"a", b"b/\xff"]
    await client.transact([], [delete(prefix, after_prefix(prefix))], [], 5)
    assert await client.read(prefix, after_prefix(prefix), 5) == ()


@needs_etcd
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


@needs_etcd
async def test_what_is_no_etcd_is_named(etcd: EtcdCluster) -> None:
    [port] = free_ports(1)
    async with opened(f"etcd://127.0.0.1:{port}") as client:
        with pytest.raises(StoreUnavailable, match=rf"^etcd at 127\.0\.0\.1:{port}: .*refused|Connect call failed"):
            await client.read(KEY, None, 5)
        with socket.create_server(("127.0.0.1", port)):
            with pytest.raises(StoreUnavailable, match=rf"^etcd at 127\.0\.0\.1:{port}: no answer within 0\.2 s"):
                await client.read(KEY, None, 0.2)


@pytest.fixture
def own() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


@needs_etcd
async def test_the_next_call_asks_another_endpoint_and_without_a_quorum_none_answers(own: EtcdCluster) -> None:
    async with opened(own.store()) as client:
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


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("etcd://a", "etcd://a:2379/lighthouse"),
        ("etcd://a,b:1,[::1]:2", "etcd://a:2379,b:1,[::1]:2/lighthouse"),
        ("etcd://a/", "etcd://a:2379/lighthouse"),
        ("etcd://a:1/x/y-z/", "etcd://a:1/x/y-z"),
        ("etcd://a:1,a:1", "etcd://a:1/lighthouse"),
    ],
)
def test_it_is_read(text: str, read: str) -> None:
    assert str(parse_etcd_address(text)) == read


@pytest.mark.parametrize(
    "text", ["a:1", "etcd://", "etcd://a,,b", "etcd://a:0", "etcd://a/ü", "etcd://a//b", "http://a"]
)
def test_another_text_is_refused_by_the_name_of_the_option(text: str) -> None:
    with pytest.raises(InvalidRequest, match="^--store: "):
        parse_etcd_address(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files of a CA, of a server and of a client that it vouches for, and of another CA."""
    for name, ca in (("", trustme.CA()), ("other-", trustme.CA())):
        ca.cert_pem.write_to_path(str(tmp_path / f"{name}ca.pem"))
        for who in ("server", "client"):
            issued = ca.issue_cert("127.0.0.1", "localhost", common_name=who)
            issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / f"{name}{who}.pem"))
    return tmp_path


@needs_etcd
async def test_tls_both_ways(folder: Path) -> None:
    with etcd_cluster(1, tls=folder) as cluster:
        trusted = StoreCredentials(folder / "ca.pem", folder / "client.pem", folder / "client.pem")
        async with opened(cluster.store(), trusted) as client:
            assert await client.read(b"k", None, 10) == ()
        for refused in (
            ANONYMOUS,
            StoreCredentials(folder / "other-ca.pem", folder / "client.pem", folder / "client.pem"),
            StoreCredentials(folder / "ca.pem"),
            StoreCredentials(folder / "ca.pem", folder / "other-client.pem", folder / "other-client.pem"),
        ):
            async with opened(cluster.store(), refused) as client:
                with pytest.raises(StoreUnavailable):
                    await client.read(b"k", None, 10)


@needs_etcd
async def test_a_certificate_that_was_renewed_is_used_without_a_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHECKED_EVERY_S", 0.0)
    mine = folder / "mine.pem"
    mine.write_bytes((folder / "other-client.pem").read_bytes())
    with etcd_cluster(1, tls=folder) as cluster:
        async with opened(cluster.store(), StoreCredentials(folder / "ca.pem", mine, mine)) as client:
            with pytest.raises(StoreUnavailable):
                await client.read(b"k", None, 10)
            mine.write_text("half a certificate")
            with pytest.raises(StoreUnavailable, match="the previous certificates are in use, because --store-cert: "):
                await client.read(b"k", None, 10)
            mine.write_bytes((folder / "client.pem").read_bytes())
            assert await client.read(b"k", None, 10) == ()


def ctl(cluster: EtcdCluster, *words: str, given: str = "") -> None:
    command = ["etcdctl", "--command-timeout", "60s", "--endpoints", f"127.0.0.1:{cluster.nodes[0].port}", *words]
    given_bytes, env = given.encode(), {"ETCDCTL_API": "3"}
    subprocess.run(command, check=True, capture_output=True, timeout=60, env=env, input=given_bytes)


def add_users(cluster: EtcdCluster) -> None:
    ctl(cluster, "user", "add", "root:r")
    ctl(cluster, "user", "grant-role", "root", "root")
    ctl(cluster, "user", "add", "me:secret:with:colons")
    ctl(cluster, "role", "add", "lighthouse")
    ctl(cluster, "role", "grant-permission", "lighthouse", "--prefix=true", "readwrite", "/lighthouse/")
    ctl(cluster, "user", "grant-role", "me", "lighthouse")
    ctl(cluster, "auth", "enable")


@pytest.fixture
def me(tmp_path: Path) -> StoreCredentials:
    file = tmp_path / "user"
    file.write_text("me:secret:with:colons\n")
    return StoreCredentials(user_file=file)


@needs_etcd
async def test_a_user_that_may_write_one_prefix(
    me: StoreCredentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHECKED_EVERY_S", 0.0)
    with etcd_cluster(1) as cluster:
        add_users(cluster)
        async with opened(cluster.store(), me) as client:
            assert await client.read(b"/lighthouse/k", None, 10) == ()
            with pytest.raises(NotPermitted, match="permission denied"):
                await client.read(b"/else", None, 10)
            client._token = "gone"  # pyright: ignore[reportPrivateUsage]  as after a restart of etcd
            assert await client.read(b"/lighthouse/k", None, 10) == (), "the call logs in anew"
            ctl(cluster, "--user", "root:r", "user", "passwd", "me", "--interactive=false", given="new")
            with pytest.raises(NotPermitted, match="authentication failed"):
                await client.read(b"/lighthouse/k", None, 10)
            (tmp_path / "user").write_text("me:new")
            assert await client.read(b"/lighthouse/k", None, 10) == (), "the new password is read"
        async with opened(cluster.store()) as client:
            with pytest.raises(NotPermitted):
                await client.read(b"/lighthouse/k", None, 10)


@needs_etcd
async def test_a_change_of_another_user_ends_no_login_with_jwt(me: StoreCredentials, tmp_path: Path) -> None:
    """Such a token holds the revision of the users at its login. After a change, etcd refuses it until it expires."""
    key = rsa.generate_private_key(65537, 2048)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    (tmp_path / "private.pem").write_bytes(private)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    files = f"pub-key={tmp_path}/public.pem,priv-key={tmp_path}/private.pem"
    with etcd_cluster(1, options=("--auth-token", f"jwt,{files},sign-method=RS256,ttl=10m")) as cluster:
        add_users(cluster)
        async with opened(cluster.store(), me) as client:
            assert await client.read(b"/lighthouse/k", None, 10) == ()
            ctl(cluster, "--user", "root:r", "role", "add", "other")
            assert await client.read(b"/lighthouse/k", None, 10) == ()
            written = await client.transact([], [put(b"/lighthouse/k", b"v")], [], 10)
            assert written.succeeded


@pytest.mark.parametrize("text", ["", "me", ":x", "me:"])
def test_what_is_no_user_is_refused_by_the_name_of_the_option(tmp_path: Path, text: str) -> None:
    (tmp_path / "user").write_text(text)
    for path in (tmp_path / "user", tmp_path / "none", tmp_path):
        with pytest.raises(InvalidRequest, match="^--store-user-file: "):
            StoreCredentials(user_file=path).user()


def test_what_is_no_certificate_is_refused_by_the_name_of_the_option(folder: Path) -> None:
    (folder / "empty").write_text("")
    for ca in (folder / "empty", folder / "none"):
        with pytest.raises(InvalidRequest, match="^--store-ca: cannot read "):
            StoreCredentials(ca).tls()
    with pytest.raises(InvalidRequest, match="^--store-cert: cannot read "):
        StoreCredentials(folder / "ca.pem", folder / "empty").tls()
    with pytest.raises(InvalidRequest, match="^--store-cert: also needs --store-ca"):
        StoreCredentials(cert=folder / "client.pem").tls()
