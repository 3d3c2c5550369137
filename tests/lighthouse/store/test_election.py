"""Whatever goes wrong with a request, the candidate learns it."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lighthouse.job.records import QuorumRecord
from lighthouse.store.election import SharedStore
from lighthouse.store.etcd_client import (
    Answer,
    EtcdClient,
    KeyValue,
    Lease,
    LeaseGone,
    StoreUnavailable,
    parse_etcd_address,
)
from lighthouse.store.etcd_store import EtcdStore
from lighthouse_protocol.refusals import NotLeader
from tests.processes import PATIENCE_S

TTL_S = 1.2


class OddClient(EtcdClient):
    """An empty etcd, but for one kind of request, which fails by an error that no refusal describes."""

    def __init__(self, fails: str, error: Exception) -> None:
        super().__init__(parse_etcd_address("etcd://nowhere:1/l"))
        self.fails, self.error = fails, error
        self.revoked: list[int] = []

    def _maybe(self, what: str) -> None:
        if what == self.fails:
            raise self.error

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def read(self, start: bytes, end: bytes | None, timeout_s: float) -> tuple[KeyValue, ...]:
        self._maybe("read" if end is None else "load")
        return ()

    async def transact(self, guards: Any, then: Any, otherwise: Any, timeout_s: float) -> Any:
        self._maybe(
            "claim" if any("request_put" in one for one in then[:1]) and len(then) == 3 else "write" * bool(guards)
        )
        return Answer(True, 7, ((), ()))

    async def grant(self, ttl_s: int, timeout_s: float) -> Any:
        self._maybe("grant")
        return Lease(5, TTL_S)

    async def renew(self, lease: int, timeout_s: float) -> float:
        self._maybe("renew")
        return TTL_S

    async def revoke(self, lease: int, timeout_s: float) -> None:
        self.revoked.append(lease)
        self._maybe("revoke")


class Lighthouse:
    def __init__(self, client: OddClient) -> None:
        self.client = client
        self.ended: asyncio.Future[NotLeader] = asyncio.get_running_loop().create_future()
        self.began = asyncio.Event()
        self.lead: Callable[[], None] = self.began.set
        self.statuses: asyncio.Queue[int] = asyncio.Queue()
        self.shared = SharedStore(client, TTL_S, lambda: self.lead(), self.follow, self.statuses.put_nowait)

    async def start(self) -> None:
        await self.shared.start("me:1", "http://me:2")

    async def error(self) -> str:
        """What the store's status shows of the first request that failed."""
        while (status := self.shared.status()) is None or not status.store_error:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return status.store_error

    def follow(self, refusal: NotLeader) -> None:
        if not self.ended.done():
            self.ended.set_result(refusal)


@pytest.mark.parametrize("fails", ["read", "grant", "claim", "load"])
async def test_a_request_that_fails_by_any_exception_is_a_failed_one_with_its_text(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    lighthouse = Lighthouse(OddClient(fails, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")))
    await lighthouse.start()
    async with asyncio.timeout(PATIENCE_S):
        assert (await lighthouse.error()).startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")
    await asyncio.sleep(0)  # the lease is given back by another task
    if fails in ("claim", "load"):
        assert lighthouse.client.revoked == [5], "its lease is given back, so that another lighthouse may lead"
    assert not lighthouse.began.is_set()
    assert any(record.exc_info for record in caplog.records), "a defect of ours: its traceback is in the log"
    await lighthouse.shared.stop()


async def test_a_leader_that_cannot_begin_to_serve_ends() -> None:
    lighthouse = Lighthouse(OddClient("nothing", StoreUnavailable("")))

    def lead() -> None:
        raise KeyError("a defect")

    lighthouse.lead = lead
    await lighthouse.start()
    async with asyncio.timeout(PATIENCE_S):
        assert await lighthouse.statuses.get() == 1
    await lighthouse.shared.stop()


async def test_candidacies_that_fail_alike_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """As with an etcd that is out of space or of a newer format, which is read as before."""
    caplog.set_level("INFO")
    lighthouse = Lighthouse(OddClient("claim", StoreUnavailable("no space")))
    await lighthouse.start()

    async def fails(times: int) -> None:
        while len(lighthouse.client.revoked) < times:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE_S):
        await fails(4)
        lighthouse.client.error = StoreUnavailable("of a newer format")
        await fails(8)
    assert [record.getMessage() for record in caplog.records] == ["store: no space", "store: of a newer format"]
    lighthouse.client.fails = "nothing"
    async with asyncio.timeout(PATIENCE_S):
        await lighthouse.began.wait()
    assert [record.getMessage() for record in caplog.records[2:]] == [
        "store: available again",
        "this lighthouse leads, in term 1",
    ]
    await lighthouse.shared.stop()


async def test_a_writer_that_fails_by_any_exception_ends_the_leadership(caplog: pytest.LogCaptureFixture) -> None:
    lighthouse = Lighthouse(OddClient("write", KeyError("header")))
    await lighthouse.start()
    async with asyncio.timeout(PATIENCE_S):
        await lighthouse.began.wait()
        lighthouse.shared.records.commit("j", QuorumRecord(1))
        await lighthouse.ended
    assert "no longer leads: its records cannot be written: KeyError: 'header'" in caplog.text
    lighthouse.client.fails = "nothing"
    lighthouse.began.clear()
    async with asyncio.timeout(PATIENCE_S):
        await lighthouse.began.wait()
        lighthouse.shared.records.commit("j", QuorumRecord(2))
        await lighthouse.shared.gate.wait_delivered()  # the same writer goes on in the next term
    await lighthouse.shared.stop()


async def test_what_a_write_sets_free_may_fail_too(caplog: pytest.LogCaptureFixture) -> None:
    """It must not end the writer: the lighthouse would hold back all that it says from then on."""
    lighthouse = Lighthouse(OddClient("nothing", ValueError()))
    await lighthouse.start()
    async with asyncio.timeout(PATIENCE_S):
        await lighthouse.began.wait()

        def fail() -> None:
            raise ValueError("a stream is closed")

        lighthouse.shared.records._hold = lambda: fail  # pyright: ignore[reportPrivateUsage]
        lighthouse.shared.records.commit("j", QuorumRecord(1))
        await lighthouse.ended
    assert "no longer leads: its records cannot be written: ValueError: a stream is closed" in caplog.text
    await lighthouse.shared.stop()


class SlowLoadClient(OddClient):
    """Its first answer to a request for all records is late, and the lease ends meanwhile."""

    def __init__(self) -> None:
        super().__init__("nothing", ValueError())
        self.loads = 0
        self.is_answered = asyncio.Event()
        self.has_answered = asyncio.Event()

    async def read(self, start: bytes, end: bytes | None, timeout_s: float) -> tuple[KeyValue, ...]:
        self.loads += end is not None
        if end is not None and self.loads == 1:
            await self.is_answered.wait()
            asyncio.get_running_loop().call_soon(self.has_answered.set)
        return ()

    async def renew(self, lease: int, timeout_s: float) -> float:
        if self.loads == 1:
            raise LeaseGone("it has expired")
        return await super().renew(lease, timeout_s)


async def test_records_that_an_ended_candidacy_asked_for_do_not_replace_those_of_the_leader() -> None:
    client = SlowLoadClient()
    lighthouse = Lighthouse(client)
    await lighthouse.start()
    async with asyncio.timeout(PATIENCE_S):
        await lighthouse.began.wait()
        assert client.loads == 2
        lighthouse.shared.records.commit("j", QuorumRecord(1))
        client.is_answered.set()
        await client.has_answered.wait()
        await lighthouse.shared.gate.wait_delivered()
    assert lighthouse.shared.records.load() == {"j": QuorumRecord(1)}
    await lighthouse.shared.stop()


async def test_the_lease_is_renewed_while_many_records_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of runs with thousands of ranks took longer than the lease: no lighthouse could ever lead."""
    take = EtcdStore.take

    def slow(store: EtcdStore, found: Iterable[KeyValue]) -> None:
        time.sleep(0.9)  # the lighthouse may act for 0.8 s after its last renewal
        take(store, found)

    monkeypatch.setattr(EtcdStore, "take", slow)
    lighthouse = Lighthouse(OddClient("nothing", StoreUnavailable("")))
    await lighthouse.start()
    async with asyncio.timeout(PATIENCE_S):
        await lighthouse.began.wait()
    await lighthouse.shared.stop()
