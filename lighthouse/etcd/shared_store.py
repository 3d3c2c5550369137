"""What a lighthouse on a shared store is made of: its place in the election, its records, and the gate before all that
it says."""

import asyncio
import logging
import secrets
from collections.abc import Callable

from lighthouse.etcd.address import EtcdAddress
from lighthouse.etcd.client import EtcdClient
from lighthouse.etcd.credentials import StoreCredentials
from lighthouse.etcd.driver import LeadershipDriver
from lighthouse.etcd.election import Election
from lighthouse.etcd.rules import events
from lighthouse.etcd.rules.candidate import CandidateConfig, CandidateStatus
from lighthouse.etcd.rules.leader import Leader, difference
from lighthouse.etcd.store import EtcdStore
from lighthouse_protocol.refusals import NotLeader
from lighthouse_runtime.log_event import event
from lighthouse_runtime.server.output_gate import OutputGate
from lighthouse_runtime.timing.suspension import SuspensionTimers

log = logging.getLogger(__name__)


class SharedStore:
    """`began` is called when this lighthouse leads and `records` are loaded; `ended` when it leads no more.

    Raises InvalidRequest for credentials that cannot be read.
    """

    def __init__(
        self,
        address: EtcdAddress,
        ttl_s: float,
        credentials: StoreCredentials,
        began: Callable[[], None],
        ended: Callable[[NotLeader], None],
    ) -> None:
        self._began = began
        self._ended = ended
        self.gate = OutputGate(self.refusal)
        self.records = EtcdStore(address.prefix, lambda: self._election.wake(), self.gate.hold)
        name = secrets.token_hex(8)
        self._config = CandidateConfig(name, ttl_s)
        client = EtcdClient(address, credentials.tls(), credentials.user())
        self._election = Election(client, self.records, self._config, Leader(name, "", "", 0))
        self._driver: LeadershipDriver | None = None

    async def start(self, address: str, page: str, ca_pin: str = "") -> None:
        """Where others reach this lighthouse, if it leads, and which CA vouches for it, if it is one of its own."""
        self._election.me = Leader(self._config.name, address, page, 0, ca_pin)
        timers = SuspensionTimers(asyncio.get_running_loop())
        self._driver = LeadershipDriver(self._config, timers, self._election, self._begin, self._end, self._compare)
        self._election.driver = self._driver
        await self._election.start()

    async def stop(self) -> None:
        """Write what is left; then another lighthouse may lead at once."""
        if self._driver is not None:
            await self._election.stop()

    def refusal(self) -> NotLeader | None:
        """What each caller is told at this moment; None: this lighthouse leads."""
        return self._driver.refusal() if self._driver is not None else NotLeader("this lighthouse is starting")

    def status(self) -> CandidateStatus | None:
        return self._driver.status() if self._driver is not None else None

    def give_up(self, status: int) -> None:
        """What the rules want written cannot be."""
        if self._driver is not None:
            self._driver.feed(events.WriteRefused("its records cannot be written"))

    def _compare(self, leader: Leader | None) -> None:
        if leader is not None and (told := difference(self._election.me, leader)):
            log.error("%s", told, extra=event("credentials_differ", leader=leader.address))

    def _begin(self, term: int, revision: int) -> None:
        self.records.begin(term, revision)
        self._began()

    def _end(self, reason: str) -> None:
        self.records.end()
        refusal = self.refusal() or NotLeader(reason)
        self.gate.drop(refusal)
        self._ended(refusal)
