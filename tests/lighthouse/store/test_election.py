"""Whatever goes wrong with a request, the candidate learns it."""

import asyncio
from typing import Any

import pytest

from lighthouse.job.records import QuorumRecord
from lighthouse.store import leadership
from lighthouse.store.election import Election, LeadershipDriver
from lighthouse.store.etcd_client import Answer, EtcdClient, KeyValue, Lease
from lighthouse.store.etcd_store import EtcdStore
from lighthouse.store.leadership import CandidateConfig, Leader
from lighthouse_protocol.refusals import NotLeader
from lighthouse_runtime.server.streams import OutputGate
from tests.processes import PATIENCE_S

TTL_S = 1.2


class OddClient(EtcdClient):
    """An empty etcd, but for one kind of request, which fails by an error that no refusal describes."""

    def __init__(self, fails: str, error: Exception) -> None:
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


class WatchedDriver(LeadershipDriver):
    def feed(self, event: leadership.Event) -> None:
        super().feed(event)
        if isinstance(event, leadership.RequestFailed) and not self.failed.done():
            self.failed.set_result(event.reason)

    failed: "asyncio.Future[str]"


class Lighthouse:
    def __init__(self, client: OddClient) -> None:
        self.client = client
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.began = asyncio.Event()
        self.gate = OutputGate()
        self.store = EtcdStore("/l", lambda: self.election.wake(), self.gate.block)
        config = CandidateConfig("me", TTL_S)
        self.election = Election(client, self.store, config, Leader("me", "me:1", "http://me:2", 0))
        timers = asyncio.get_running_loop()
        self.driver = WatchedDriver(config, timers, self.election, self._begin, self._end)
        self.driver.failed = timers.create_future()
        self.election.driver = self.driver

    def _begin(self, term: int, revision: int) -> None:
        self.store.begin(term, revision)
        self.began.set()

    def _end(self, reason: str) -> None:
        self.store.end()
        self.gate.drop(NotLeader(reason))
        if not self.ended.done():
            self.ended.set_result(reason)


@pytest.mark.parametrize("fails", ["read", "grant", "claim", "load"])
async def test_a_request_that_fails_by_any_exception_is_a_failed_one_with_its_text(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    lighthouse = Lighthouse(OddClient(fails, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")))
    await lighthouse.election.start()
    async with asyncio.timeout(PATIENCE_S):
        assert (await lighthouse.driver.failed).startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")
    await asyncio.sleep(0)  # the lease is given back by another task
    if fails in ("claim", "load"):
        assert lighthouse.client.revoked == [5], "its lease is given back, so that another lighthouse may lead"
    assert not lighthouse.began.is_set()
    assert any(record.exc_info for record in caplog.records), "a defect of ours: its traceback is in the log"
    await lighthouse.election.stop()


async def test_a_writer_that_fails_by_any_exception_ends_the_leadership(caplog: pytest.LogCaptureFixture) -> None:
    lighthouse = Lighthouse(OddClient("write", KeyError("header")))
    await lighthouse.election.start()
    async with asyncio.timeout(PATIENCE_S):
        await lighthouse.began.wait()
        lighthouse.store.commit("j", QuorumRecord(1))
        assert await lighthouse.ended == "its records cannot be written: KeyError: 'header'"
    lighthouse.client.fails = "nothing"
    lighthouse.began.clear()
    async with asyncio.timeout(PATIENCE_S):
        await lighthouse.began.wait()
        lighthouse.store.commit("j", QuorumRecord(2))
        await lighthouse.gate.wait_delivered()  # the same writer goes on in the next term
    await lighthouse.election.stop()


async def test_what_a_write_sets_free_may_fail_too() -> None:
    """It must not end the writer: the lighthouse would hold back all that it says from then on."""
    lighthouse = Lighthouse(OddClient("nothing", ValueError()))
    await lighthouse.election.start()
    async with asyncio.timeout(PATIENCE_S):
        await lighthouse.began.wait()

        def fail() -> None:
            raise ValueError("a stream is closed")

        lighthouse.store._hold = lambda: fail  # pyright: ignore[reportPrivateUsage]
        lighthouse.store.commit("j", QuorumRecord(1))
        assert await lighthouse.ended == "its records cannot be written: ValueError: a stream is closed"
    await lighthouse.election.stop()
