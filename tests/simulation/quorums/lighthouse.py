"""The lighthouse: the product's registry of jobs and its JobDriver on a virtual clock, its journal, and its streams.

A new life has what the journal kept, and waits for the holders of what an earlier one may have sent.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from lighthouse.job.driver import Answer, JobDriver
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import QuorumConfig, QuorumRecord, dump_quorum, parse_quorum
from lighthouse.job.registry import JobRegistry
from lighthouse.job.run_driver import Ports
from lighthouse_protocol.limits import SECRET_BYTES
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import Hello, JoinAccepted, JoinRejected, QuorumChanged
from lighthouse_protocol.refusals import LighthouseError, WrongState
from lighthouse_runtime.server.streams import OutputGate
from tests.simulation.checks import observe
from tests.simulation.lighthouse import LighthouseProcess, Site
from tests.simulation.network import LIGHTHOUSE_HOST, End, Network
from tests.simulation.quorums.checkers import Checkers
from tests.simulation.quorums.lighthouse_checks import Ledger, LighthouseChecks
from tests.simulation.quorums.torchft_manager import UnaryAnswer, UnaryCancel, UnaryHeartbeat, UnaryQuorum
from tests.simulation.world import Timers, World

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group

JOB = "j"
DISK_RETRY_S = 0.5
SCRAPED_EVERY_S = 15.0
FIRST_WALL_S = 1_700_000_000.0
KEPT = 10
# An id that is a day above the clock is refused as one that was never given out.
MAX_WALL_OFFSET_S = 43_200.0


class Journal:
    """The records in the order of their writes. The disk may be slow or full."""

    def __init__(self) -> None:
        self.records: list[QuorumRecord] = []
        self.write_s = 0.0
        self.is_full = self.tears_next = False

    @property
    def record(self) -> QuorumRecord | None:
        return self.records[-1] if self.records else None

    def write(self, record: QuorumRecord) -> None:
        self.records.append(parse_quorum(dump_quorum(record)))
        del self.records[:-KEPT]

    def lose(self, writes: int | None) -> None:
        del self.records[slice(None) if writes is None else slice(-writes, None)]


class Lighthouse(Site["QuorumLighthouse"]):
    """What outlives a process: the journal, the settings and the clock."""

    def __init__(
        self, world: World, network: Network, config: QuorumConfig, checkers: Checkers, host: str = LIGHTHOUSE_HOST
    ) -> None:
        super().__init__(world, network, host)
        self.wall_offset_s = self.most_offset_s = 0.0  # now, and the highest so far
        self.config = config
        self.checkers = checkers
        self.journal = Journal()
        self.ledger = Ledger()

    def create(self) -> "QuorumLighthouse":
        return QuorumLighthouse(self)

    def wall(self) -> float:
        """Return the wall clock in seconds since the epoch."""
        return FIRST_WALL_S + self.world.now + self.wall_offset_s

    def find(
        self, group: "Group", connected: Callable[[End], None], failed: Callable[[], None]
    ) -> "tuple[Lighthouse, Callable[[End], None], Callable[[], None]]":
        """Return the lighthouse that a group connects to, with the callbacks for the connection."""
        return self, connected, failed

    def speaks(self, process: "QuorumLighthouse") -> None:
        """Check that a process may send."""

    def told(self, quorum: Quorum) -> None:
        """Note that a quorum is about to be sent."""
        self.checkers.told(quorum, self.journal.record, self.host)

    def start(self) -> None:
        """Start unless the disk is full: the lighthouse writes to its journal when it starts."""
        if self.journal.is_full and not self.is_up:
            self.world.after(DISK_RETRY_S, self.start)
        else:
            super().start()

    def close_connections(self, for_s: float) -> None:
        """Close all connections and refuse new ones for a while, as a proxy does. The process continues."""
        assert self.process is not None
        self.refuses_until = max(self.refuses_until, self.world.now + for_s)
        self.network.close_all(self.process)

    def vanish(self, back_after_s: float) -> None:
        """Turn the power of the host off. Its peers are not notified."""
        if self.process is not None and self.process.is_up:
            self.network.vanish(self.process)
        self.kill(back_after_s)

    def lose_journal(self, writes: int | None = None) -> None:
        """Delete the newest `writes` records, or all, while the lighthouse is down.

        Ids are unique by the journal or by the wall clock, so this ends a wall clock that was set back.
        """
        self.wall_offset_s = self.most_offset_s
        self.journal.lose(writes)
        self.ledger.lost_journal()

    def set_wall_clock(self, by_s: float) -> None:
        self.wall_offset_s = max(-MAX_WALL_OFFSET_S, min(MAX_WALL_OFFSET_S, self.wall_offset_s + by_s))
        self.most_offset_s = max(self.most_offset_s, self.wall_offset_s)
        if self.ledger.is_blank:
            self.wall_offset_s = self.most_offset_s

    def change_lease(self, lease_s: float) -> None:
        """Use another lease from the next start on."""
        self.config = replace(self.config, lease_s=lease_s)


class QuorumLighthouse(LighthouseProcess):
    """One life of the lighthouse. It is also a RecordStore for jobs that writes to the site's journal."""

    def __init__(self, site: Lighthouse) -> None:
        super().__init__(site, f"{site.host}{site.starts}")
        self.site = site
        self.config = site.config
        self.checks = LighthouseChecks(self.config, site.ledger, site.world)
        self.gate = OutputGate()
        self._is_making = False
        self._driver: JobDriver | None = None
        self._sessions: dict[End, tuple[JobDriver, int]] = {}
        self._calls: dict[tuple[End, int], tuple[JobDriver, int]] = {}
        record = site.journal.record
        self.log(f"starts with {record and record.quorum_id}")
        site.ledger.starts(record, self.config.lease_s, site.world.now)
        self.jobs = JobRegistry(
            self.config,
            Ports(Timers(self), site.wall, draw_secret=lambda: token_hex(SECRET_BYTES)),
            self,
            self._give_up,
        )
        self.jobs.load_records(self.load())
        self._scrape()

    @property
    def driver(self) -> JobDriver:
        """The driver of the job. It is new if the registry has forgotten the job meanwhile."""
        self._is_making = True
        driver = self.jobs.get_job(JOB)
        self._is_making = False
        if driver is not self._driver:
            self._driver = driver
            observe(driver.machine, self.checks)
        return driver

    @property
    def machine(self) -> QuorumMachine:
        return self.driver.machine

    def _scrape(self) -> None:
        """Forget quiet jobs, as a scrape of /metrics does."""
        self.jobs.forget_quiet()
        self.after(SCRAPED_EVERY_S, self._scrape)

    # -- connections: what the RPCs do

    def stream_ended(self, end: End) -> None:
        super().stream_ended(end)
        for key in [key for key in self._calls if key[0] is end]:
            with suppress(LighthouseError):
                self._cancel(*key)
        if (session := self._sessions.pop(end, None)) is not None:
            driver, number = session
            with suppress(LighthouseError):
                driver.end_session(number)

    def receive(self, end: End, message: Any) -> None:
        """Handle a message. A handler that raises a refusal ends its stream with that status."""
        try:
            self._handle(end, message)
        except LighthouseError as error:
            if end in self._sessions or isinstance(message, Hello):
                EndPeer(self, end).end(error)
            else:
                self.log(f"refuses a call: {error}")
                self.close_stream(end)

    def _handle(self, end: End, message: Any) -> None:
        if isinstance(message, Hello):
            driver = self.driver
            self._sessions[end] = driver, driver.open_session(message, EndPeer(self, end))
        elif (session := self._sessions.get(end)) is not None:
            driver, number = session
            driver.receive_from_manager(number, message)
        else:
            self._receive_call(end, message)

    def _receive_call(self, end: End, message: Any) -> None:
        match message:
            case UnaryHeartbeat(replica_id, incarnation):
                self.driver.receive_heartbeat_call(replica_id, incarnation)
            case UnaryQuorum(number, participant, time_left_s):
                driver = self.driver
                call = driver.request_quorum(participant, time_left_s, UnaryReply(self, end, number))
                self._calls[end, number] = driver, call
            case UnaryCancel(number):
                self._cancel(end, number)
            case _:  # what was under way when the stream ended
                pass

    def _cancel(self, end: End, number: int) -> None:
        if (waiting := self._calls.pop((end, number), None)) is not None:
            driver, call = waiting
            driver.cancel_request(call)

    # -- the journal

    def claim(self) -> int:
        return self.site.starts

    def load(self) -> Mapping[str, QuorumRecord]:
        record = self.site.journal.record
        return {JOB: record} if record is not None else {}

    def last_id(self, job: str) -> int:
        record = self.site.journal.record
        return record.quorum_id if record is not None else 0

    def commit(self, job: str, record: QuorumRecord) -> None:
        """Write a record. It is durable when this returns."""
        is_formed = not self._is_making and record.ended is None  # else its lease is longer, or its job has ended
        if is_formed:
            self.fire_crash()
        self.may_die()
        self._write(record)
        if record.ended is not None:
            self.site.checkers.job_ended()
        if is_formed and record.quorum is not None:
            self.site.checkers.formed(record.quorum, stands=record.stands)

    def _write(self, record: QuorumRecord) -> None:
        journal = self.site.journal
        if journal.is_full:
            raise WrongState("the disk is full")
        if journal.tears_next:
            journal.tears_next = False
            self.die("dies in the middle of a write", DISK_RETRY_S)
        if journal.write_s:
            self.pause(journal.write_s)
        journal.write(record)
        self.site.ledger.wrote(record)

    def forget(self, job: str) -> None:
        self.may_die()
        if (record := self.site.journal.record) is not None:
            self._write(QuorumRecord(record.quorum_id))

    def release(self) -> None:
        pass

    # -- its end

    def _give_up(self, status: int) -> None:
        """End the daemon in good order."""
        self.after(0, self.die, f"ends with status {status}", DISK_RETRY_S)


@dataclass(frozen=True, slots=True)
class EndPeer:
    """A lighthouse_runtime.ports.Peer."""

    lighthouse: QuorumLighthouse
    stream: End

    def send(self, message: Any) -> None:
        quorum = self.lighthouse.checks.formed if isinstance(message, QuorumChanged) else None
        self.lighthouse.gate.deliver(lambda: self._send(message, quorum))

    def end(self, error: LighthouseError | None = None) -> None:
        self.lighthouse.gate.deliver(lambda: self._end(error))

    def _send(self, message: Any, formed: Quorum | None) -> None:
        lighthouse = self.lighthouse
        lighthouse.may_die()
        lighthouse.site.speaks(lighthouse)
        if isinstance(message, JoinAccepted):
            lighthouse.site.told(message.quorum)
        if formed is not None:
            lighthouse.world.counts["quorums told by what has changed"] += 1
            lighthouse.site.told(formed)
        if isinstance(message, JoinRejected):
            lighthouse.log(f"refuses a join: {message.error}")
        self.stream.send(message)

    def _end(self, error: LighthouseError | None) -> None:
        """Send the status of a stream as a message, because connections here have no status."""
        if error is not None:
            self.lighthouse.log(f"ends a session: {error}")
            self.stream.send(JoinRejected(0, error))
        self.lighthouse.close_stream(self.stream)


@dataclass(frozen=True, slots=True)
class UnaryReply:
    """A lighthouse_runtime.ports.Reply."""

    lighthouse: QuorumLighthouse
    stream: End
    number: int

    def answer(self, value: Answer) -> None:
        self.lighthouse.gate.deliver(lambda: self._answer(value))

    def refuse(self, error: LighthouseError) -> None:
        self.lighthouse.gate.deliver(lambda: self._refuse(error))

    def _answer(self, value: Answer) -> None:
        self.lighthouse.may_die()
        self.lighthouse.site.told(value.quorum)
        self.stream.send(UnaryAnswer(self.number, value.quorum))

    def _refuse(self, error: LighthouseError) -> None:
        self.lighthouse.log(f"refuses a join: {error}")
        self.stream.send(UnaryAnswer(self.number, error))
