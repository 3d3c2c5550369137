"""Two lighthouses on one store: the product's candidate, records and output gate, and a model of etcd.

The store keeps acknowledged writes, handles each request in one moment, and ends a lease no sooner than its time, by
its own clock. Requests and answers take time. During a cut, they are lost or come much later.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lighthouse.job.records import QuorumConfig, QuorumRecord, parse_quorum
from lighthouse.store import leadership
from lighthouse.store.election import LeadershipDriver, Request
from lighthouse.store.etcd_client import KeyValue
from lighthouse.store.etcd_store import Batch, EtcdStore, read_row
from lighthouse.store.leadership import FENCE_SHARE, CandidateConfig, Leader
from lighthouse.store.records import Delete, Keys, Put
from lighthouse_protocol.coordinator import LeaderSearch
from lighthouse_protocol.identity import Address
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import Hello
from lighthouse_protocol.refusals import LighthouseError, NotLeader, Unreachable
from lighthouse_runtime.server.streams import OutputGate
from tests.simulation.network import LIGHTHOUSE_HOST, End, Network
from tests.simulation.quorums.checkers import Checkers
from tests.simulation.quorums.faults.two_lighthouses import STORE_HOST
from tests.simulation.quorums.lighthouse import JOB, Journal, Lighthouse, QuorumLighthouse
from tests.simulation.quorums.lighthouse_checks import Ledger, LighthouseChecks, member_of
from tests.simulation.world import Process, Timers, Violation, World

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group

HOSTS = (LIGHTHOUSE_HOST, "lighthouse2")
PREFIX = "/l"
TTL_S = 3.0
BACK_AFTER_S = 1.0
RETRY_S = 0.05
MUCH_LATER_S = (0.5, 6.0)
Answer = Callable[[object], None]


@dataclass(slots=True)
class LeaderKey:
    leader: Leader
    lease: int
    made_at: int
    version: int = 1


class Etcd(Process):
    """The store: its leader key, and the records that all its nodes agree on."""

    def __init__(self, world: World, wrote: Callable[[QuorumRecord, str], None]) -> None:
        super().__init__(world, STORE_HOST, STORE_HOST)
        self._wrote = wrote
        self.is_stopped = False  # it has no quorum
        self.values: dict[bytes, tuple[bytes, int]] = {}
        self.key: LeaderKey | None = None
        self._leases: dict[int, float] = {}
        self._revision = 1
        self._term = 0

    def handle(self, request: Request | Batch, who: Leader) -> object:
        clock = self.clock()
        self._expire(clock)
        match request:
            case leadership.ReadLeader(number):
                return leadership.LeaderRead(number, self.leader)
            case leadership.GrantLease(number, ttl_s):
                lease = self._change()
                self._leases[lease] = clock + ttl_s
                return leadership.LeaseGranted(number, lease, ttl_s)
            case leadership.Claim(number, lease):
                return self._claim(number, lease, who)
            case leadership.LoadRecords():
                return [KeyValue(key, value, 1, at, 1, 0) for key, (value, at) in self.values.items()]
            case leadership.RenewLease(number, lease):
                if lease not in self._leases:
                    return leadership.LeaseEnded(number)
                self._leases[lease] = clock + TTL_S
                return leadership.LeaseRenewed(number, TTL_S)
            case leadership.RevokeLease(lease):
                self._leases.pop(lease, None)
                if self.key is not None and self.key.lease == lease:
                    self.key = None
                return None
            case Batch():
                return self._write(request, who)

    @property
    def leader(self) -> Leader | None:
        self._expire(self.clock())
        return self.key.leader if self.key is not None else None

    def _expire(self, clock: float) -> None:
        self._leases = {lease: until for lease, until in self._leases.items() if until > clock}
        if self.key is not None and self.key.lease not in self._leases:
            self.key = None

    def _change(self) -> int:
        self._revision += 1
        return self._revision

    def _claim(self, number: int, lease: int, who: Leader) -> leadership.Event:
        if lease not in self._leases:
            return leadership.RequestFailed(number, "etcdserver: requested lease not found")
        if self.key is not None:
            return leadership.ClaimLost(number, self.leader)
        self._term += 1
        self.key = LeaderKey(replace(who, term=self._term), lease, self._change())
        return leadership.ClaimWon(number, self.key.made_at, self._term)

    def holds_guards(self, batch: Batch) -> bool:
        key = self.key
        return key is not None and (key.made_at, key.version) == (batch.revision, batch.version)

    def _write(self, batch: Batch, who: Leader) -> bool:
        if not self.holds_guards(batch):
            key = self.key
            return key is not None and (key.made_at, key.version) == (batch.revision, batch.version + 1)
        at = self._change()
        if self.key is not None:
            self.key.version += 1
        for change in batch.changes:
            match change:
                case Put(key_, value):
                    self.values[key_] = value, at
                    if key_ == Keys(PREFIX).job(JOB):
                        self._wrote(parse_quorum(read_row(key_, value, {})), who.candidate)
                case Delete(key_, None):
                    self.values.pop(key_, None)
                case Delete(key_, end):
                    for found in [k for k in self.values if key_ <= k < (end or b"")]:
                        del self.values[found]
        return True


class SharedLedger(Ledger):
    """The ledger of both lighthouses. A new leader begins it where a single lighthouse would at a start."""

    def starts(self, record: QuorumRecord | None, lease_s: float, now: float) -> None:
        pass

    def leads(self, record: QuorumRecord | None, lease_s: float, now: float) -> None:
        super().starts(record, lease_s, now)
        quorum = record.quorum if record is not None else None
        self.standing = quorum if record is not None and record.stands else None
        self.last = frozenset(map(member_of, quorum.participants)) if quorum is not None else frozenset()


class ChecksOfLeader(LighthouseChecks):
    """Checks of the leader only. A deposed leader's effects are neither written nor sent."""

    def __init__(self, process: "Contender") -> None:
        super().__init__(process.config, process.site.ledger, process.world)
        self._process = process

    def effect(self, effect: Any) -> None:
        if self._process.may_speak:
            super().effect(effect)


class Contender(QuorumLighthouse):
    """One of two lighthouses that compete for the leader key, as lighthouse/store/election.py does."""

    site: "Seat"

    def __init__(self, site: "Seat") -> None:
        self.records = EtcdStore(PREFIX, self._wake, self._hold)
        self.leadership: LeadershipDriver | None = None
        self._is_writing = False
        self._ends: dict[End, None] = {}
        super().__init__(site)
        self.gate = OutputGate(self._refusal)
        self._config_ = CandidateConfig(self.name, TTL_S)
        self.leadership = LeadershipDriver(self._config_, Timers(self), self)
        self.leadership.tick()

    def _hold(self) -> Callable[[], None]:
        return self.gate.hold()

    def _refusal(self) -> NotLeader | None:
        return self.leadership.refusal() if self.leadership is not None else NotLeader("starts")

    @property
    def may_speak(self) -> bool:
        return self._refusal() is None

    @property
    def leads(self) -> bool:
        return self.is_up and not self.is_paused and self.may_speak

    def leadership_began(self, term: int, revision: int) -> None:
        self.log(f"leads in term {term}")
        self.world.counts["terms"] += 1
        self.records.begin(term, revision)
        self._driver = None
        self.checks = ChecksOfLeader(self)
        self.site.pair.leads(self)
        self.jobs.load_records(self.records.load())

    def leader_changed(self, leader: Leader | None) -> None:
        pass

    def leadership_ended(self, reason: str) -> None:
        self.log(f"leads no more: {reason}")
        self.world.counts["leaders deposed"] += 1
        self.records.end()
        self.gate.drop(NotLeader(reason))
        self.jobs.close(reason)
        for end in list(self._ends):
            self.close_stream(end)

    # -- connections

    def accept(self, end: End) -> None:
        self._ends[end] = None
        super().accept(end)

    def stream_ended(self, end: End) -> None:
        self._ends.pop(end, None)
        super().stream_ended(end)

    def receive(self, end: End, message: Any) -> None:
        refusal = self._refusal()
        if refusal is None:
            return super().receive(end, message)
        if isinstance(message, Hello):
            self.site.pair.refused(end, refusal)
        return self.close_stream(end)

    def _give_up(self, status: int) -> None:
        if self.leadership is not None:
            self.leadership.feed(leadership.WriteRefused("its records cannot be written"))

    # -- a RecordStore, for jobs

    def load(self) -> "dict[str, QuorumRecord]":
        return dict(self.records.load())

    def last_id(self, job: str) -> int:
        return self.records.last_id(job)

    def commit(self, job: str, record: QuorumRecord) -> None:
        if not self._is_making:
            self.fire_crash()
        self.may_die()
        self.records.commit(job, record)

    def forget(self, job: str) -> None:
        self.may_die()
        self.records.forget(job)

    # -- the store

    def send(self, request: Request) -> None:
        """Send a request to the store (LeaderStore)."""
        number = getattr(request, "number", None)

        def answered(answer: object) -> None:
            assert self.leadership is not None
            if isinstance(answer, list):
                self.records.take(answer)
                answer = leadership.RecordsLoaded(request.number)  # type: ignore[union-attr]
            if answer is not None:
                self.leadership.feed(answer)  # type: ignore[arg-type]

        self._ask(request, answered, None if number is None else lambda: self._failed(number))

    def _failed(self, number: int) -> None:
        assert self.leadership is not None
        self.leadership.feed(leadership.RequestFailed(number, "etcd: no answer"))

    def _ask(self, request: Request | Batch, answered: Answer, failed: Callable[[], None] | None) -> None:
        """Send a request. A late answer is ignored."""
        is_over: list[bool] = []

        def hear(answer: object) -> None:
            if not is_over:
                is_over.append(True)
                answered(answer)

        def expire() -> None:
            if not is_over:
                is_over.append(True)
                if failed is not None:
                    failed()

        store, me = self.site.pair.store, Leader(self._config_.name, f"{self.host}:1", "", 0)

        def arrive() -> None:
            if store.is_stopped:
                return
            answer = store.handle(request, me)
            self._travel(STORE_HOST, self.host, self, hear, answer)

        self._travel(self.host, STORE_HOST, store, arrive)
        self.after(self._config_.request_timeout_s / self.rate, expire)

    def _travel(self, source: str, target: str, to: Process, act: Callable[..., None], *args: object) -> None:
        network, draw = self.site.network, self.world.random
        delay_s = network.delay_s()
        if network.is_cut(source, target):
            if draw.random() < 0.5:
                return
            delay_s += draw.uniform(*MUCH_LATER_S)
        self.world.at(self.world.now + delay_s, to, act, *args)

    def _wake(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            self.after(0, self._write, self.clock())

    def _write(self, since: float) -> None:
        batch = self.records.next_batch()
        if batch is None:
            self._is_writing = False
            return

        def answered(is_written: object) -> None:
            if self.records.next_batch() is batch:
                self.records.written() if is_written else self._refuse_write()
            self._write(self.clock())

        def failed() -> None:
            if self.records.next_batch() is batch and self.clock() - since >= FENCE_SHARE * TTL_S:
                self._refuse_write()
            self.after(RETRY_S, self._write, since if self.records.next_batch() is batch else self.clock())

        self._ask(batch, answered, failed)

    def _refuse_write(self) -> None:
        assert self.leadership is not None
        self.leadership.feed(leadership.WriteRefused("its records cannot be written"))


class Seat(Lighthouse):
    """The place of one of the two lighthouses."""

    def __init__(self, pair: "TwoLighthouses", host: str) -> None:
        super().__init__(pair.world, pair.network, pair.config, pair.checkers, host)
        self.pair = pair
        self.journal, self.ledger = pair.journal, pair.ledger

    def speaks(self, process: QuorumLighthouse) -> None:
        leader = self.pair.store.leader
        if leader is None or leader.candidate != process.name:
            raise Violation(f"S1 {process.name} speaks, and the leader is {leader and leader.candidate}")

    def told(self, quorum: Quorum) -> None:
        self.pair.told(quorum, self)

    def create(self) -> Contender:
        return Contender(self)


class TwoLighthouses(Lighthouse):
    """Two lighthouses in the place of one. `process` leads, or led last."""

    def __init__(self, world: World, network: Network, config: QuorumConfig, checkers: Checkers) -> None:
        super().__init__(world, network, config, checkers)
        self.journal = Journal()
        self.ledger: SharedLedger = SharedLedger()
        self.store = Etcd(world, self._wrote)
        self.seats = [Seat(self, host) for host in HOSTS]
        self._searches: dict[str, LeaderSearch] = {}
        self._asked: dict[str, LighthouseError] = {}

    @property
    def leader(self) -> Contender | None:
        found = [s.process for s in self.seats if isinstance(s.process, Contender) and s.process.leads]
        if len(found) > 1:
            raise Violation(f"S1 {[process.name for process in found]} lead at once")
        return found[0] if found else None

    @property
    def is_up(self) -> bool:
        return self.leader is not None

    def start(self) -> None:
        for seat in self.seats:
            seat.start()

    def kill(self, back_after_s: float) -> None:
        """Kill the leader."""
        for seat in self.seats:
            if seat.process is not None and seat.process is self.process:
                seat.kill(back_after_s)

    def leads(self, process: Contender) -> None:
        self.process = process
        self.ledger.leads(self.journal.record, self.config.lease_s, self.world.now)

    def _wrote(self, record: QuorumRecord, author: str) -> None:
        leader = self.store.leader
        if leader is None or leader.candidate != author:
            raise Violation(f"S1 {author} has written {record.quorum_id}, and the leader is {leader}")
        self.world.log(STORE_HOST, f"has {record.quorum_id}, by {author}")
        self.journal.write(record)
        self.ledger.wrote(record)
        if record.quorum is not None:
            self.checkers.formed(record.quorum, stands=False)

    def told(self, quorum: Quorum, seat: "Seat | None" = None) -> None:
        self.checkers.told(quorum, self.journal.record, LIGHTHOUSE_HOST)

    # -- how groups find the one that leads

    def find(
        self, group: "Group", connected: Callable[[End], None], failed: Callable[[], None]
    ) -> "tuple[Lighthouse, Callable[[End], None], Callable[[], None]]":
        search = self._searches.setdefault(group.name, LeaderSearch([Address(host, 1) for host in HOSTS]))
        if (error := self._asked.pop(group.name, None)) is not None:
            search.mark_failed(error)
        self._asked[group.name] = Unreachable("it has ended the connection")
        seat = next(seat for seat in self.seats if seat.host == search.address.host)

        def asked(end: End) -> None:
            """Begin the session if this lighthouse leads."""
            process = seat.process
            if isinstance(process, Contender) and process.leads:
                connected(end)
                return
            if isinstance(process, Contender) and (refusal := process.leadership and process.leadership.refusal()):
                self._asked[group.name] = refusal
            end.close()
            failed()

        return seat, asked, failed

    def refused(self, end: End, refusal: NotLeader) -> None:
        group = getattr(end.peer.process, "site", None)
        if group is not None:
            self._asked[group.name] = refusal
