"""A store as the lighthouse that holds it has it, over SQLite and over etcd, in one form for the tests of both."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Protocol

import lighthouse.store.records
from lighthouse.job.store import RecordStore
from lighthouse.store.election import SharedStore
from lighthouse.store.etcd_client import EtcdClient, parse_etcd_address
from lighthouse.store.sqlite import Journal

CLAIM_S = 30.0
TTL_S = 30.0  # a test may compute for seconds on a busy machine


class Holder(Protocol):
    """One lighthouse that has claimed the store."""

    store: RecordStore

    def settle(self) -> None:
        """All that was committed is durable. Raises a refusal if it will never be."""
        ...

    def release(self) -> None: ...


class Stores(Protocol):
    """One place. `limits`: the modules whose FORGOTTEN_JOBS, FINISHED_RUNS_KEPT and RUNS_KEPT count."""

    limits: tuple[ModuleType, ...]

    def claim(self) -> Holder: ...

    def take_away(self, holder: Holder) -> None:
        """Another one may claim it, and `holder` is not told."""
        ...

    def close(self) -> None: ...


# -- SQLite


class JournalHolder:
    def __init__(self, path: Path) -> None:
        self.store = Journal(path)
        self.store.claim()

    def settle(self) -> None:
        """It was durable when the call returned."""

    def release(self) -> None:
        self.store.release()


class Journals:
    limits = (lighthouse.store.records,)

    def __init__(self, path: Path) -> None:
        self._path = path

    def claim(self) -> JournalHolder:
        return JournalHolder(self._path)

    def take_away(self, holder: Holder) -> None:
        self._path.with_name(self._path.name + ".lock").unlink()

    def close(self) -> None:
        pass


# -- etcd


class EtcdHolder:
    def __init__(self, run: Callable[..., None], address: str) -> None:
        self._run = run
        self._leads = asyncio.Event()
        self._client = EtcdClient(parse_etcd_address(address))
        self.shared = SharedStore(self._client, TTL_S, self._leads.set, lambda refusal: None, print)
        self.store = self.shared.records

    def start(self) -> None:
        self._run(self._start())

    async def _start(self) -> None:
        await self.shared.start("me:1", "http://me:2")
        async with asyncio.timeout(CLAIM_S):
            await self._leads.wait()

    async def _passed(self) -> None:
        async with asyncio.timeout(CLAIM_S):
            await self.shared.gate.wait_delivered()

    def settle(self) -> None:
        self._run(self._passed())

    def lose_lease(self) -> None:
        async def revoke() -> None:
            [leader] = await self._client.read(self.store.keys.leader, None, 5)
            await self._client.revoke(leader.lease, 5)

        self._run(revoke())

    def release(self) -> None:
        self._run(self.shared.stop())


class Etcds:
    limits = (lighthouse.store.records,)

    def __init__(self, address: str) -> None:
        self._address = address
        self._runner = asyncio.Runner()
        self._holders: list[EtcdHolder] = []

    def claim(self) -> EtcdHolder:
        holder = EtcdHolder(self._runner.run, self._address)
        self._holders.append(holder)
        holder.start()
        return holder

    def take_away(self, holder: Holder) -> None:
        assert isinstance(holder, EtcdHolder)
        holder.lose_lease()

    def close(self) -> None:
        with contextlib.closing(self._runner):
            for holder in self._holders:
                holder.release()
