"""The lighthouse of a run: the product's RunDriver on a virtual clock, its journal, and its streams.

A new life has the journal alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lighthouse.job import events
from lighthouse.job.records import Row, RunConfig, RunName, RunRecord, SavedRun, dump_run, parse_run
from lighthouse.job.restarts import RunMachine
from lighthouse.job.run_driver import Ports, RunDriver
from lighthouse_protocol.messages.run import HelloRejected, KeyKind, RankHello, RankId, SupervisorHello
from lighthouse_protocol.refusals import LighthouseError, NotPermitted
from tests.lighthouse.peers import NoJobs
from tests.simulation.checks import Checks, observe
from tests.simulation.lighthouse import LighthouseProcess, Site
from tests.simulation.network import KEEPALIVE_EVERY_S, End
from tests.simulation.world import Timers

if TYPE_CHECKING:
    from tests.simulation.runs.rank import RankProcess
    from tests.simulation.runs.simulation import RunSimulation
    from tests.simulation.runs.supervisor import Host

NAME = ("default", "default")
NOT_THE_SECRET = "what another process would show"
WALL_SKEW_S = (0.0, -31.0, 31.0)


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """A unary call that writes a key of the run, or reads it if `value` is None."""

    generation: int
    kind: KeyKind
    name: str
    value: bytes | None = None
    slot: int = 0
    secret: str = ""


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    request: KeyRequest
    value: bytes | None
    error: LighthouseError | None


class Lighthouse(Site["RunLighthouse"]):
    """What outlives a process: the journal."""

    def __init__(self, simulation: "RunSimulation") -> None:
        super().__init__(simulation.world, simulation.network)
        self.simulation = simulation
        self.record: bytes | None = None
        self.rows: dict[tuple[int, str, str], Row] = {}

    def create(self) -> "RunLighthouse":
        return RunLighthouse(self)

    def lose_journal(self) -> None:
        """Delete all records while the lighthouse is down."""
        self.record = None
        self.rows.clear()
        self.simulation.checkers.journal_lost()


class RunLighthouse(LighthouseProcess):
    """One life of the lighthouse. It is also a RecordStore for runs that writes to the site's journal."""

    term = 0

    def __init__(self, site: Lighthouse) -> None:
        super().__init__(site, site.host)
        self.site = site
        self.simulation = site.simulation
        self.checkers = site.simulation.checkers
        skew_s = self.world.random.choice(WALL_SKEW_S)
        config = RunConfig(site.simulation.plan.rank_timeout_s, wall_offset_s=skew_s, run=NAME[1])
        record = None if site.record is None else parse_run(site.record)
        self.machine = RunMachine(config, record=record, keys=tuple(site.rows.values()), now=self.clock())
        observe(self.machine, RunChecks(self))
        self.driver = RunDriver(NAME, self.machine, self, Ports(Timers(self), lambda: 0.0), NoJobs())
        self._sessions: dict[End, tuple[int, bool]] = {}
        self._undurable: Sequence[events.RunEffect] = ()
        self.checkers.lighthouse_started(self.machine)
        self.log(f"starts with generation {self.machine.generations.current.number}, stop {self.machine.stop}")
        self.driver.handle_pause(0.0)  # nothing lapses by it; the driver's timer is set

    # -- streams: what the RPCs of a run do

    def stream_ended(self, end: End) -> None:
        super().stream_ended(end)
        session, is_supervisor = self._sessions.pop(end, (None, False))
        if session is not None:
            self.driver.end_supervisor(session) if is_supervisor else self.driver.end_rank(session)

    def receive(self, end: End, message: Any) -> None:
        session, is_supervisor = self._sessions.get(end, (None, False))
        if isinstance(message, KeyRequest):
            self._answer(end, message)
        elif session is None:
            self._open(end, message)
        elif is_supervisor:
            self.driver.receive_from_supervisor(session, message)
        else:
            self.driver.receive_from_rank(session, message)

    def _open(self, end: End, message: Any) -> None:
        match message:
            case RankHello():
                self.checkers.entered(message)
                self._sessions[end] = self.driver.open_rank(message, EndPeer(self, end)), False
            case SupervisorHello():
                self.checkers.supervisor_entered(message.incarnation)
                self._sessions[end] = self.driver.open_supervisor(message, EndPeer(self, end)), True
            case _:  # what was under way when the stream ended
                pass

    # -- keys

    def _answer(self, end: End, request: KeyRequest) -> None:
        value, error = request.value, None
        try:
            if request.value is None:
                value = self.machine.keys.present_keys(request.generation).get((request.kind, request.name))
            else:
                key = request.generation, request.kind, request.name, request.value
                self.driver.put_key(*key, slot=request.slot, secret=request.secret)
        except LighthouseError as refusal:
            error = refusal
        self.checkers.key_answered(request, value, error, self.machine.generations.current.number)
        end.send(KeyAnswer(request, value, error))

    # -- somebody else, who has not the secret

    def supervise_as(self, host: "Host") -> None:
        """Send a hello with the name of a connected supervisor. It must be refused (G13)."""
        known = next((each for each in self.machine.supervisors if each.entry.name == host.name), None)
        if known is None or known.session is None or self.machine.stop or self.machine.completed is not None:
            return
        another = self.simulation.new_name("x")
        incarnation, session = self.world.random.choice((known.entry.incarnation, another)), known.session
        hello = SupervisorHello(host.name, incarnation, "elsewhere", host.slots, NOT_THE_SECRET)
        peer = Stranger()
        self.driver.end_supervisor(self.driver.open_supervisor(hello, peer))
        self.checkers.refused_stranger(hello, peer.heard, known.session == session)

    def enter_as(self, rank: "RankProcess") -> None:
        """Send a hello with the slot of a live rank, and write a key. Both must be refused (G13)."""
        ranks, r = self.machine.generations.ranks, self.world.random
        known = ranks.find_live(rank.rank)
        if known is None or known.session is None:
            return
        session, is_same = known.session, r.random() < 0.5
        who = rank.rank if is_same else RankId(rank.rank.slot, "another")
        hello = RankHello(who, self.simulation.plan.terms, rank.attempt + 1, "elsewhere", secret=NOT_THE_SECRET)
        peer = Stranger()
        self.driver.end_rank(self.driver.open_rank(hello, peer))
        is_there = ranks.find_live(rank.rank) is known and known.session == session
        self.checkers.refused_stranger(hello, peer.heard, is_there)
        number = self.machine.generations.current.number
        try:
            key = number, KeyKind.ITERATION, "stolen", b""
            self.driver.put_key(*key, slot=rank.rank.slot, secret=NOT_THE_SECRET)
        except NotPermitted as error:
            self.checkers.refused_stranger(key, [HelloRejected(error)], True)
        else:
            self.checkers.refused_stranger(key, [], True)

    # -- the journal

    def load_run(self, name: RunName) -> SavedRun | None:
        raise NotImplementedError("the registry's")

    def run_names(self, newest: int) -> Sequence[RunName]:
        raise NotImplementedError("the registry's")

    def commit_run(self, name: RunName, record: RunRecord, keys_from: int) -> None:
        self.may_die()
        self.site.record = dump_run(record)
        self.site.rows = {key: row for key, row in self.site.rows.items() if key[0] >= keys_from}
        self.checkers.written(record)
        effects, self._undurable = self._undurable, ()
        self._check(effects)
        if any(isinstance(effect, events.GenerationFormed) for effect in effects):
            self.fire_crash()

    def commit_key(self, name: RunName, row: Row) -> None:
        self.may_die()
        self.site.rows[row[0], row[1], row[2]] = row

    # -- the machine

    def handled(self, event: events.RunEvent | None, effects: Sequence[events.RunEffect]) -> None:
        """Pass effects to the checkers, at the write of the record if they depend on it."""
        self.checkers.handled(self.machine, event)
        if any(isinstance(effect, events.RecordDue) for effect in effects):
            self._undurable = effects
        else:
            self._check(effects)

    def _check(self, effects: Sequence[events.RunEffect]) -> None:
        for effect in effects:
            self.log(f"{effect}")
            self.checkers.effect(self.machine, effect)

    def wake(self, for_s: float) -> None:
        super().wake(for_s)
        late_s = for_s * self.rate - self.world.random.uniform(0, KEEPALIVE_EVERY_S)
        if late_s > KEEPALIVE_EVERY_S:
            self.driver.handle_pause(late_s)

    def die(self, why: str, back_after_s: float) -> None:
        self.simulation.trouble(None, until=self.world.now + 2.0)
        super().die(why, back_after_s)


class Stranger:
    """A lighthouse_runtime.ports.Peer."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def end(self, error: LighthouseError | None = None) -> None:
        self.heard += [HelloRejected(error)] if error is not None else []


class EndPeer:
    """A lighthouse_runtime.ports.Peer."""

    def __init__(self, lighthouse: RunLighthouse, end: End) -> None:
        self._lighthouse = lighthouse
        self._end = end

    def send(self, message: Any) -> None:
        self._lighthouse.may_die()
        self._end.send(message)

    def end(self, error: LighthouseError | None = None) -> None:
        self._lighthouse.close_stream(self._end)


class RunChecks(Checks):
    """Pass what goes in and out of the machine to the checkers of the run."""

    def __init__(self, lighthouse: RunLighthouse) -> None:
        self._lighthouse = lighthouse

    def before(self, event: events.RunEvent | None, now: float) -> None:
        self._lighthouse.checkers.recount.begins(self._lighthouse.machine, event, now)

    def after(self, event: events.RunEvent | None, effects: Sequence[events.RunEffect]) -> None:
        self._lighthouse.handled(event, effects)

    def deadline(self, due: float | None, *now: float) -> None:
        self._lighthouse.checkers.settled(self._lighthouse.machine, due, *now)
