"""An etcd that is reached by TLS, and one that asks for a user."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from lighthouse.store.etcd_client import EtcdClient, StoreCredentials, StoreUnavailable, parse_etcd_address
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from tests.etcd_cluster import EtcdCluster, etcd_cluster, needs_etcd


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
        address = parse_etcd_address(cluster.store())
        trusted = StoreCredentials(folder / "ca.pem", folder / "client.pem", folder / "client.pem")
        async with EtcdClient(address, trusted.tls()) as client:
            assert await client.read(b"k", None, 10) == ()
        for refused in (
            StoreCredentials(),
            StoreCredentials(folder / "other-ca.pem", folder / "client.pem", folder / "client.pem"),
            StoreCredentials(folder / "ca.pem"),
            StoreCredentials(folder / "ca.pem", folder / "other-client.pem", folder / "other-client.pem"),
        ):
            async with EtcdClient(address, refused.tls()) as client:
                with pytest.raises(StoreUnavailable):
                    await client.read(b"k", None, 10)


@pytest.fixture
def with_users() -> Iterator[EtcdCluster]:
    with etcd_cluster(1) as cluster:

        def ctl(*words: str) -> None:
            command = ["etcdctl", "--endpoints", f"127.0.0.1:{cluster.nodes[0].port}", *words]
            subprocess.run(command, check=True, capture_output=True, timeout=60, env={"ETCDCTL_API": "3"})

        ctl("user", "add", "root:r")
        ctl("user", "grant-role", "root", "root")
        ctl("user", "add", "me:secret:with:colons")
        ctl("role", "add", "lighthouse")
        ctl("role", "grant-permission", "lighthouse", "--prefix=true", "readwrite", "/lighthouse/")
        ctl("user", "grant-role", "me", "lighthouse")
        ctl("auth", "enable")
        yield cluster


@needs_etcd
async def test_a_user_that_may_write_one_prefix(with_users: EtcdCluster, tmp_path: Path) -> None:
    address = parse_etcd_address(with_users.store())
    file = tmp_path / "user"
    file.write_text("me:secret:with:colons\n")
    async with EtcdClient(address, None, StoreCredentials(user_file=file).user()) as client:
        assert await client.read(b"/lighthouse/k", None, 10) == ()
        with pytest.raises(NotPermitted, match="permission denied"):
            await client.read(b"/else", None, 10)
        client._token = "gone"  # pyright: ignore[reportPrivateUsage]  as after a restart of etcd
        with pytest.raises(NotPermitted, match="invalid auth token"):
            await client.read(b"/lighthouse/k", None, 10)
        assert await client.read(b"/lighthouse/k", None, 10) == (), "the next call logs in anew"
    async with EtcdClient(address, None) as client:
        with pytest.raises(NotPermitted):
            await client.read(b"/lighthouse/k", None, 10)


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
