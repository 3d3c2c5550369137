"""Loopback addresses of every kind beside a routable one, whoever comes first: real managers, sockets and watches."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from agent_client.manager_client.client import ManagerConnection
from lighthouse_protocol.identity import Address
from lighthouse_protocol.messages.membership import Assignment, Participant
from lighthouse_protocol.refusals import InvalidRequest, WrongState
from lighthouse_runtime.client.lighthouse import AsyncLighthouseClient, LighthouseClient
from lighthouse_runtime.net import own_address
from manager.server.config import ManagerConfig
from manager.server.daemon import ManagerDaemon
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, eventually

pytestmark = pytest.mark.slow

MY_HOST = "myhost"  # as on Debian, whose /etc/hosts gives the host's own name 127.0.1.1
KINDS = ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "localhost", MY_HOST]
NOBODYS = ["0.0.0.0", "::", "::ffff:0.0.0.0"]
LEASE = ("--heartbeat-timeout", "1s", "--lease", "1s")

_jobs = itertools.count(1)


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse(*LEASE) as process:
        yield process


@pytest.fixture(autouse=True)
def as_on_debian(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        own_address.socket,
        "getaddrinfo",
        lambda host, *a, **k: resolve("127.0.1.1" if host == MY_HOST else host, *a, **k),
    )


@pytest.fixture
def routable() -> str:
    found = own_address._first_global_address()
    if found is None:
        pytest.skip("this host has a loopback only, so that nothing is routable")
    return found


class Group:
    """One rank and its manager. `revoked`: why each quorum of it was."""

    def __init__(self, lighthouse: Lighthouse, job: str, name: str, host: str) -> None:
        self.name, self.job, self.host, self.revoked = name, job, host, list[str]()
        self.daemon = ManagerDaemon(
            ManagerConfig(
                lighthouse=lighthouse.address,
                replica_id=name,
                job=job,
                bind="[::]:0",
                advertise=host,
                store=str(Address(host, 1)),
            ),
            None,
            lambda status: None,
        )

    async def start(self) -> None:
        await self.daemon.start()
        port = self.daemon.address.rpartition(":")[2]
        self._link = ManagerConnection(
            f"{LOCALHOST}:{port}", 0, self.name, lambda _, why: self.revoked.append(why), returns_within_s=0.0
        )

    async def stop(self) -> None:
        await asyncio.to_thread(self._link.close)
        await self.daemon.stop()

    async def ask(self, *, failures: int = 0) -> Assignment:
        return await asyncio.to_thread(
            self._link.ask, 0, "", tag_quorum_id=0, commit_failures=failures, timeout_s=PATIENCE_S
        )


@contextlib.asynccontextmanager
async def started(*groups: Group) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for group in groups:
            await group.start()
            stack.push_async_callback(group.stop)
        yield


async def all_known(lighthouse: Lighthouse, *groups: Group) -> None:
    wanted = {(group.job, group.name) for group in groups}

    def are_known() -> bool:
        with LighthouseClient(lighthouse.address) as client:
            return wanted <= {(job.job, member.replica_id) for job in client.status().jobs for member in job.members}

    await asyncio.to_thread(eventually, are_known)


def names(job_lighthouse: Lighthouse, hidden: str, routable: str) -> tuple[Group, Group]:
    job = f"reach-{next(_jobs)}"
    return Group(job_lighthouse, job, "h", hidden), Group(job_lighthouse, job, "a", routable)


def check_words(error: str, hidden: Group, other: Group) -> None:
    """It names both, and the remedy."""
    what = "a name that is a loopback on its own host" if hidden.host == MY_HOST else "a loopback"
    assert f"h advertises {what} (http://{hidden.daemon.address})" in error
    assert f"beside a (http://{other.daemon.address})" in error
    assert "--advertise" in error


@pytest.mark.parametrize("kind", KINDS)
async def test_who_comes_on_a_loopback_beside_a_routable_one_is_refused(
    lighthouse: Lighthouse, routable: str, kind: str
) -> None:
    hidden, other = names(lighthouse, kind, routable)
    async with started(other):
        quorum = await other.ask()
        async with started(hidden):
            with pytest.raises(WrongState) as refused:
                await hidden.ask()
            check_words(str(refused.value), hidden, other)
        assert quorum.replica_ids == ("a",)
        assert other.revoked == [], "it trains on"


@pytest.mark.parametrize("kind", KINDS)
async def test_who_has_come_first_on_a_loopback_is_sent_away_and_its_quorum_is_over(
    lighthouse: Lighthouse, routable: str, kind: str
) -> None:
    hidden, other = names(lighthouse, kind, routable)
    async with started(hidden):
        assert (await hidden.ask()).replica_ids == ("h",)
        async with started(other):
            quorum = await other.ask()
            assert quorum.replica_ids == ("a",)
            with pytest.raises(WrongState) as refused:
                await hidden.ask(failures=1)
        check_words(str(refused.value), hidden, other)
        assert len(hidden.revoked) == 1
        check_words(hidden.revoked[0], hidden, other)
        assert other.revoked == []


@pytest.mark.parametrize("kind", KINDS)
async def test_among_its_like_each_is_welcome(lighthouse: Lighthouse, kind: str) -> None:
    hidden, other = names(lighthouse, kind, "127.0.0.1")
    async with started(hidden, other):
        await all_known(lighthouse, hidden, other)  # else who is known alone has a quorum alone
        for quorum in await asyncio.gather(hidden.ask(), other.ask()):
            assert quorum.replica_ids == ("a", "h")


@pytest.mark.parametrize("kind", NOBODYS)
@pytest.mark.parametrize("field", ["address", "store_address"])
async def test_what_is_nobodys_address_is_always_refused(lighthouse: Lighthouse, kind: str, field: str) -> None:
    """Alone, and beside others of either sort."""
    job = f"reach-{next(_jobs)}"
    everybody = Participant("n", address="10.0.0.9:1", store_address="10.0.0.9:2")
    nobodys = Participant("n", **{"address": "10.0.0.9:1", "store_address": "10.0.0.9:2", field: str(Address(kind, 1))})
    async with AsyncLighthouseClient(lighthouse.address, job=job) as client:
        with pytest.raises(InvalidRequest, match=f"{field}: .* is nobody's address"):
            await client.quorum(nobodys, timeout_s=PATIENCE_S)
        assert (await client.quorum(everybody, timeout_s=PATIENCE_S)).participants[0].replica_id == "n"
    with pytest.raises(ValueError, match="--advertise: .* is nobody's address"):
        ManagerConfig(lighthouse=lighthouse.address, replica_id="n", advertise=kind)
