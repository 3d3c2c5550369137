"""Leader election and record writing on etcd.

`LeadershipDriver` passes events to a `Candidate` (leadership.py) and executes its effects. `SharedStore` sends the
candidate's requests to etcd, and writes the records that the leader queues in its `EtcdStore`. Its output gate delays
the leader's answers until etcd has acknowledged the records on which they depend.
"""

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

from lighthouse.store import etcd_client as etcd
from lighthouse.store import etcd_store as store
from lighthouse.store import leadership as events
from lighthouse.store.etcd_client import EtcdClient, KeyValue, LeaseGone
from lighthouse.store.etcd_store import EtcdStore
from lighthouse.store.leadership import (
    FENCE_SHARE,
    Candidate,
    CandidateConfig,
    CandidateStatus,
    Leader,
    difference,
    dump,
    parse,
)
from lighthouse.store.records import after_prefix
from lighthouse_protocol.refusals import LighthouseError, NotLeader
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.process.loop import start_part
from lighthouse_runtime.server.streams import OutputGate
from lighthouse_runtime.timing.pacing import SuspensionTimers
from lighthouse_runtime.timing.timers import DeadlineTimer

log = logging.getLogger(__name__)


Request = (
    events.ReadLeader | events.GrantLease | events.Claim | events.LoadRecords | events.RenewLease | events.RevokeLease
)


class CandidateHost(Protocol):
    """The process in which a candidate runs. It sends the candidate's requests and acts on the results of elections."""

    def send(self, request: Request) -> None:
        """Send a request to the store without blocking. The driver later receives the answer, or RequestFailed."""
        ...

    def leadership_began(self, term: int, revision: int) -> None:
        """Handle this candidate's election. Its writes require that the leader's key was created at `revision`."""
        ...

    def leadership_ended(self, reason: str) -> None:
        """Handle the end of this candidate's leadership. Called before this process can send anything else."""
        ...

    def leader_changed(self, leader: Leader | None) -> None:
        """Handle a change of leader. `leader` is None if no other lighthouse is known to lead."""
        ...


MAX_FAILURES_LOGGED = 16  # different failures since the last success


class LeadershipDriver:
    """Runs one candidate: passes events to it and executes its effects. It is synchronous and does no I/O itself.

    Args:
        config: The candidate's name and the lease's duration.
        timers: Clock and timers.
        host: Executes the candidate's effects.
    """

    def __init__(self, config: CandidateConfig, timers: Timers, host: CandidateHost) -> None:
        self._clock = timers.time
        self.candidate = Candidate(config, self._clock())
        self._host = host
        self._timer = DeadlineTimer(self.tick, timers)
        self._failures: set[str] = set()  # texts of failures logged since the last success

    def feed(self, told: events.Event) -> None:
        effects = self.candidate.handle(told, self._clock())
        if isinstance(told, events.RequestFailed):
            self._log_failure(told.reason)
        elif self._failures and not self.status().store_error:
            self._failures.clear()
            log.info("store: available again", extra=event("store_available"))
        self._perform(effects)

    def _log_failure(self, reason: str) -> None:
        if reason not in self._failures and len(self._failures) < MAX_FAILURES_LOGGED:
            self._failures.add(reason)
            log.warning("store: %s", reason, extra=event("store_unavailable"))

    def tick(self) -> None:
        """Let the candidate do what is due now. Call this once at the start. A timer makes all later calls."""
        self._perform(self.candidate.tick(self._clock()))

    def refusal(self) -> NotLeader | None:
        """Return the error with which to refuse calls now, or None if this lighthouse is the leader.

        This only compares the lease with the clock. A timer ends the leadership once its lease has expired.
        """
        return self.candidate.refusal(self._clock())

    def status(self) -> CandidateStatus:
        return self.candidate.status(self._clock())

    def resign(self) -> None:
        """Resign, so that another lighthouse can become the leader at once."""
        self.feed(events.Resigned())
        self._timer.cancel()

    def _perform(self, effects: Sequence[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.LeadershipBegan(term, revision):
                    log.info("this lighthouse leads, in term %d", term, extra=event("leadership_began", term=term))
                    self._host.leadership_began(term, revision)
                case events.LeadershipEnded(reason):
                    log.warning("this lighthouse no longer leads: %s", reason, extra=event("leadership_ended"))
                    self._host.leadership_ended(reason)
                case events.LeaderChanged(leader):
                    if leader is not None:
                        fields = event("leader_changed", leader=leader.address, term=leader.term)
                        text = "this lighthouse follows %s, which leads in term %d"
                        log.info(text, leader.address, leader.term, extra=fields)
                    self._host.leader_changed(leader)
                case _:
                    self._host.send(effect)
        self._timer.set(self.candidate.deadline())


RETRY_S = 0.05


class SharedStore:
    """Connects a lighthouse to an etcd cluster: elects a leader, and stores the leader's records.

    The output gate holds back messages until the records on which they depend are stored.

    Args:
        client: Client for the cluster, not yet open.
        ttl_s: The lease's duration in seconds.
        lead: Starts serving as the leader. The records are already loaded.
        follow: Stops serving, and refuses all callers with the given error.
        end: Ends this lighthouse with an exit status, after a defect.
    """

    def __init__(
        self,
        client: EtcdClient,
        ttl_s: float,
        lead: Callable[[], None],
        follow: Callable[[NotLeader], None],
        end: Callable[[int], object],
    ) -> None:
        self._client = client
        self._lead, self._follow, self._end = lead, follow, end
        self.gate = OutputGate(self.refusal)
        self.records = EtcdStore(client.address.prefix, self._wake, self.gate.hold)
        self._config = CandidateConfig(secrets.token_hex(8), ttl_s)
        self._timeout_s = self._config.request_timeout_s
        self._me = Leader(self._config.name, "", "", 0)
        self._loading = 0  # number of the newest request for all records
        self._driver: LeadershipDriver | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def start(self, address: str, page: str, ca_pin: str = "") -> None:
        """Connect to etcd and take part in the election.

        Args:
            address: gRPC address at which others can reach this lighthouse.
            page: URL of its dashboard.
            ca_pin: Pin of the lighthouse's own CA, or empty if another CA signs its certificate.
        """
        self._me = Leader(self._config.name, address, page, 0, ca_pin)
        timers = SuspensionTimers(asyncio.get_running_loop())
        self._driver = LeadershipDriver(self._config, timers, self)
        await self._client.open()
        self._writer = asyncio.create_task(self._write(), name="etcd writer")
        self._driver.tick()

    async def stop(self) -> None:
        """Write all queued records and revoke the lease, so that another lighthouse can become the leader at once."""
        if self._driver is None:
            return
        if self._driver.refusal() is None and not self.records.is_written:
            try:
                async with asyncio.timeout(self._config.ttl_s * FENCE_SHARE):
                    await self._is_idle.wait()
            except TimeoutError:
                log.warning("store: the last records were not written", extra=event("store_not_written"))
        if self._writer is not None:
            self._writer.cancel()
        self._driver.resign()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def refusal(self) -> NotLeader | None:
        """Return the error with which to refuse calls now, or None if this lighthouse is the leader."""
        return self._driver.refusal() if self._driver is not None else NotLeader("this lighthouse is starting")

    def status(self) -> CandidateStatus | None:
        return self._driver.status() if self._driver is not None else None

    def give_up(self, status: int) -> None:
        """Give up the leadership, because a record cannot be written. Ignore `status`: the process does not exit."""
        self._refuse("its records cannot be written")

    # -- the candidate's effects

    def leadership_began(self, term: int, revision: int) -> None:
        self.records.begin(term, revision)
        self._lead()

    def leadership_ended(self, reason: str) -> None:
        self.records.end()
        refusal = self.refusal() or NotLeader(reason)
        self.gate.drop(refusal)
        self._follow(refusal)

    def leader_changed(self, leader: Leader | None) -> None:
        if leader is not None and (text := difference(self._me, leader)):
            log.error("%s", text, extra=event("credentials_differ", leader=leader.address))

    def send(self, request: Request) -> None:
        task = start_part(self._perform(request), "the election", self._end)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _perform(self, request: Request) -> None:
        answer: events.Event | None
        try:
            answer = await self._answer(request)
        except Exception as e:  # noqa: BLE001  without any answer the candidate would wait forever
            if isinstance(request, events.RevokeLease):
                return  # the lease expires even if it is not revoked
            answer = events.RequestFailed(request.number, _reason(e))
        if answer is not None and self._driver is not None:
            self._driver.feed(answer)

    async def _answer(self, request: Request) -> events.Event | None:
        match request:
            case events.ReadLeader(number):
                found = await self._client.read(self.records.keys.leader, None, self._timeout_s)
                return events.LeaderRead(number, _leader(found))
            case events.GrantLease(number, ttl_s):
                lease = await self._client.grant(round(ttl_s), self._timeout_s)
                return events.LeaseGranted(number, lease.id, lease.ttl_s)
            case events.Claim(number, lease):
                return await self._claim(number, lease)
            case events.LoadRecords(number):
                everything = self.records.keys.all
                end = after_prefix(everything)
                timeout_s = self._config.ttl_s * FENCE_SHARE
                self._loading, fresh = number, EtcdStore(self._client.address.prefix, self._wake, self.gate.hold)
                # In a thread, because the lease must be renewed while many records are parsed.
                await asyncio.to_thread(fresh.take, await self._client.read(everything, end, timeout_s))
                if self._loading == number and not self.records.is_leading:  # not late, for an earlier candidacy
                    self.records.take_from(fresh)
                return events.RecordsLoaded(number)
            case events.RenewLease(number, lease):
                try:
                    return events.LeaseRenewed(number, await self._client.renew(lease, self._timeout_s))
                except LeaseGone:
                    return events.LeaseEnded(number)
            case events.RevokeLease(lease):
                await self._client.revoke(lease, self._timeout_s)
                return None

    async def _claim(self, number: int, lease: int) -> events.ClaimWon | events.ClaimLost:
        names = self.records.keys
        before = await self._client.transact([], [etcd.read(names.term), etcd.read(names.format)], [], self._timeout_s)
        found, format_ = before.reads
        if format_:
            store.check_format(names.format, format_[0].value)
        term, changed_at = (store.parse_number(names.term, found[0].value), found[0].mod_revision) if found else (0, 0)
        me = dataclasses.replace(self._me, term=term + 1)
        answer = await self._client.transact(
            [etcd.was_made_at(names.leader, 0), etcd.was_changed_at(names.term, changed_at)],
            [
                etcd.put(names.leader, dump(me), lease),
                etcd.put(names.term, str(me.term).encode()),
                etcd.put(names.format, str(store.FORMAT).encode()),
            ],
            [etcd.read(names.leader)],
            self._timeout_s,
        )
        if answer.succeeded:
            return events.ClaimWon(number, answer.revision, me.term)
        return events.ClaimLost(number, _leader(answer.reads[0]))

    # -- the records

    def _wake(self) -> None:
        self._is_idle.clear()
        self._has_work.set()

    async def _write(self) -> None:
        while True:
            try:
                await self._write_all()
            except Exception as e:  # noqa: BLE001  a leader that cannot write must send nothing more
                self._refuse(f"its records cannot be written: {_reason(e)}")
                await asyncio.sleep(RETRY_S)

    async def _write_all(self) -> None:
        began_at: float | None = None
        clock = asyncio.get_running_loop().time
        while True:
            batch = self.records.next_batch()
            if batch is None:
                began_at = None
                self._has_work.clear()
                self._is_idle.set()
                await self._has_work.wait()
                continue
            began_at = clock() if began_at is None else began_at
            try:
                is_written = await self._write_batch(batch)
            except Exception:
                if self.records.next_batch() is not batch:
                    continue
                if clock() - began_at >= FENCE_SHARE * self._config.ttl_s:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            if self.records.next_batch() is not batch:
                continue  # this leadership has ended in the meantime
            began_at = None
            if is_written:
                self.records.written()
            else:
                self._refuse("another lighthouse leads: the leader's key no longer belongs to this one")

    async def _write_batch(self, batch: store.Batch) -> bool:
        names = self.records.keys
        answer = await self._client.transact(
            store.guards(names, batch), store.operations(names, batch), [etcd.read(names.leader)], self._timeout_s
        )
        if answer.succeeded:
            return True
        found = answer.reads[0]
        return store.was_written(batch, found[0] if found else None)

    def _refuse(self, reason: str) -> None:
        if self._driver is not None:
            self._driver.feed(events.WriteRefused(reason))


def _reason(error: Exception) -> str:
    """Return the error from a failed request as text. Log the traceback if the error is not a LighthouseError."""
    if isinstance(error, LighthouseError):
        return str(error)
    log.error("store: a request failed unexpectedly", exc_info=error, extra=event("store_request_failed"))
    return f"{type(error).__name__}: {error}"


def _leader(found: tuple[KeyValue, ...]) -> Leader | None:
    """Parse the leader's key. Return None if it does not exist.

    Raises:
        DamagedRecord: If the key cannot be parsed, for example because another program wrote it. No lighthouse can then
            become the leader.
    """
    if not found:
        return None
    try:
        return parse(found[0].value)
    except ValueError as e:
        raise store.DamagedRecord(found[0].key, str(e)) from e
