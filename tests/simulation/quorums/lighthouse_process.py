"""The lighthouse: the product's registry of jobs and its JobDriver on a virtual clock, its journal, and the ends of its
connections.

It can die before each write and before each message. A new life has what the journal kept, and waits for the holders of
what an earlier one may have told.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lighthouse.job.driver import Answer, JobDriver
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import QuorumConfig, QuorumRecord
from lighthouse.job.registry import JobRegistry
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import Hello, JoinAccepted, JoinRejected, QuorumChanged
from lighthouse_protocol.refusals import LighthouseError, WrongState
from lighthouse_runtime.server.streams import OutputGate
from tests.simulation.checks import observe
from tests.simulation.keepalive import Keepalive
from tests.simulation.network import End
from tests.simulation.quorums.lighthouse_checks import LighthouseChecks
from tests.simulation.quorums.torchft_manager import UnaryAnswer, UnaryCancel, UnaryHeartbeat, UnaryQuorum
from tests.simulation.world import Died, Process, Timers

if TYPE_CHECKING:
    from tests.simulation.quorums.lighthouse_site import Lighthouse

JOB = "j"
DISK_RETRY_S = 0.5
SCRAPED_EVERY_S = 15.0


class LighthouseProcess(Process):
    """The part of a RecordStore for jobs, too: what it commits is in the site's journal."""

    def __init__(self, site: "Lighthouse") -> None:
        super().__init__(site.world, f"{site.host}{site.starts}", site.host)
        self.site = site
        self.config = site.config
        self.checks = LighthouseChecks(self.config, site.ledger, site.world)
        self.gate = OutputGate()
        self.crash_in: int | None = None
        self._armed: int | None = None
        self._is_making = False
        self._driver: JobDriver | None = None
        self._sessions: dict[End, tuple[JobDriver, int]] = {}
        self._calls: dict[tuple[End, int], tuple[JobDriver, int]] = {}
        self._keepalive = Keepalive(self, self._ended)
        self.on_death.append(self._die)
        record = site.journal.record
        self.say(f"starts with {record and record.quorum_id}")
        site.ledger.starts(record, self.config.lease_s, site.world.now)
        self.jobs = JobRegistry(self._config, Timers(self), self, self._give_up, wall=site.wall)
        self.jobs.remember(self.load())
        self._scrape()

    def _config(self, first_quorum_id: int) -> QuorumConfig:
        return replace(self.config, first_quorum_id=first_quorum_id)

    @property
    def driver(self) -> JobDriver:
        """Made anew where the job has been forgotten meanwhile."""
        self._is_making = True
        driver = self.jobs.get(JOB)
        self._is_making = False
        if driver is not self._driver:
            self._driver = driver
            observe(driver.machine, self.checks)
        return driver

    @property
    def machine(self) -> QuorumMachine:
        return self.driver.machine

    def _scrape(self) -> None:
        """As /metrics does it."""
        self.jobs.forget_quiet()
        self.after(SCRAPED_EVERY_S, self._scrape)

    # -- connections: what the RPCs do

    def accept(self, end: End) -> None:
        end.on_message = lambda message: self._receive(end, message)
        end.on_end = lambda: self._ended(end)
        self._keepalive.watch(end)

    def _ended(self, end: End) -> None:
        self._keepalive.forget(end)
        for key in [key for key in self._calls if key[0] is end]:
            with suppress(LighthouseError):
                self._cancel(*key)
        if (session := self._sessions.pop(end, None)) is not None:
            driver, number = session
            with suppress(LighthouseError):
                driver.end_session(number)

    def _receive(self, end: End, message: Any) -> None:
        """A handler that raises a refusal ends its stream by that status."""
        try:
            self._handle(end, message)
        except LighthouseError as error:
            if end in self._sessions or isinstance(message, Hello):
                EndPeer(self, end).end(error)
            else:
                self.say(f"refuses a call: {error}")
                self.close_stream(end)

    def _handle(self, end: End, message: Any) -> None:
        if isinstance(message, Hello):
            driver = self.driver
            self._sessions[end] = driver, driver.open_session(message, EndPeer(self, end))
        elif (session := self._sessions.get(end)) is not None:
            driver, number = session
            driver.receive(number, message)
        else:
            self._receive_call(end, message)

    def _receive_call(self, end: End, message: Any) -> None:
        match message:
            case UnaryHeartbeat(replica_id, incarnation):
                self.driver.beat(replica_id, incarnation)
            case UnaryQuorum(number, participant, time_left_s):
                driver = self.driver
                call = driver.join(participant, time_left_s, UnaryReply(self, end, number))
                self._calls[end, number] = driver, call
            case UnaryCancel(number):
                self._cancel(end, number)
            case _:  # what was under way when the stream ended
                pass

    def _cancel(self, end: End, number: int) -> None:
        if (waiting := self._calls.pop((end, number), None)) is not None:
            driver, call = waiting
            driver.withdraw(call)

    def close_stream(self, end: End) -> None:
        """From our side; then its handler returns."""
        end.close()
        self.after(0, self._ended, end)

    def pause(self, for_s: float) -> None:
        super().pause(for_s)
        self.after(for_s, self._keepalive.begin_anew)

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
        """Durable when it returns."""
        is_formed = not self._is_making and record.ended is None  # else its lease is longer, or its job has ended
        if is_formed:
            self._fire_crash()
        self.may_die()
        self._write(record)
        if is_formed and record.quorum is not None:
            self.site.checkers.formed(record.quorum, stands=record.stands)

    def _write(self, record: QuorumRecord) -> None:
        journal = self.site.journal
        if journal.is_full:
            raise WrongState("the disk is full")
        if journal.tears_next:
            journal.tears_next = False
            self._end("dies in the middle of a write", DISK_RETRY_S)
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

    def arm_crash(self, effects: int, *, patience_s: float) -> None:
        """Die so many writes and messages after the next quorum has formed; if none does in time, after any."""
        self._armed = effects
        self.after(patience_s, self._fire_crash)

    def _fire_crash(self) -> None:
        if self._armed is not None:
            self.crash_in, self._armed = self._armed, None

    def may_die(self) -> None:
        if self.crash_in is None:
            return
        self.crash_in -= 1
        if self.crash_in < 0:
            self.world.counts["crashed while telling"] += 1
            self._end("crashes", self.world.random.choice((0.05, 0.5, 2.0)))

    def _give_up(self, status: int) -> None:
        """The daemon ends by itself, in good order."""
        self.after(0, self._end, f"ends with status {status}", DISK_RETRY_S)

    def _end(self, why: str, back_after_s: float) -> None:
        self.say(why)
        self.site.kill(back_after_s)
        raise Died

    def _die(self) -> None:
        self.say("is killed")
        self.site.network.end_all(self)


@dataclass(frozen=True, slots=True)
class EndPeer:
    """A lighthouse_runtime.ports.Peer."""

    lighthouse: LighthouseProcess
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
            lighthouse.say(f"refuses a join: {message.error}")
        self.stream.send(message)

    def _end(self, error: LighthouseError | None) -> None:
        """A status ends a stream; here it is a word before its end."""
        if error is not None:
            self.lighthouse.say(f"ends a session: {error}")
            self.stream.send(JoinRejected(0, error))
        self.lighthouse.close_stream(self.stream)


@dataclass(frozen=True, slots=True)
class UnaryReply:
    """A lighthouse_runtime.ports.Reply."""

    lighthouse: LighthouseProcess
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
        self.lighthouse.say(f"refuses a join: {error}")
        self.stream.send(UnaryAnswer(self.number, error))
