"""The lighthouse of a run: its pure machine, driven as in production, its journal, and the ends of its streams.

What is written comes before what is told, and it can die between any two effects. A new life has the journal alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lighthouse.runs.rules import events
from lighthouse.runs.rules.config import RunConfig
from lighthouse.runs.rules.key_space import KeySpaces
from lighthouse.runs.rules.machine import RunMachine
from lighthouse.runs.rules.record import RunRecord, dump, parse
from lighthouse_protocol.messages.run import (
    Done,
    Entry,
    Failure,
    Finish,
    Over,
    RankId,
    Ready,
    Refusal,
    StepReport,
    Told,
    Welcome,
)
from lighthouse_protocol.messages.supervisor import HostExcluded, StopAsked, SupervisorEntry, WorkerLost
from lighthouse_protocol.refusals import LighthouseError
from tests.simulation.network import End
from tests.simulation.runs.keys import KeyAnswer, KeyRequest
from tests.simulation.runs.links import PULSE_S, Keepalive
from tests.simulation.world import Died, Process, Timer

if TYPE_CHECKING:
    from tests.simulation.runs.site import LighthouseSite

HOST = "lighthouse"
NOTED_WITHIN_S = 0.2
WALL_SKEW_S = (0.0, -31.0, 31.0)


class RunLighthouse(Process):
    def __init__(self, site: "LighthouseSite") -> None:
        super().__init__(site.world, "lighthouse", HOST)
        self.site = site
        self.simulation = site.simulation
        self.checkers = site.simulation.checkers
        record = None if site.record is None else parse(site.record)
        config = RunConfig(
            rank_timeout_s=site.simulation.plan.rank_timeout_s, wall_offset_s=self.world.random.choice(WALL_SKEW_S)
        )
        self.machine = RunMachine(config, record=record, now=self.clock())
        self.machine.keys = KeySpaces(self.machine.generations.life.number, site.rows.values())
        self.streams: dict[RankId, End] = {}
        self.supervisors: dict[int, End] = {}
        self._names: dict[End, tuple[int, SupervisorEntry]] = {}
        self._sessions: dict[End, int] = {}
        self._ranks: dict[End, RankId] = {}
        self._next_session = 0
        self._crash_in: int | None = None
        self._is_armed = self._has_notes = False
        self._timer = Timer(self, self._tick)
        self._keepalive = Keepalive(self, self._ended)
        self.on_death.append(lambda: self.simulation.network.end_all(self))
        self.checkers.lighthouse_started(self.machine)
        self.say(f"starts with generation {self.machine.generations.life.number}, stop {self.machine.stop}")
        self._timer.set(self.machine.deadline(self.clock()))

    # -- streams

    def accept(self, end: End) -> None:
        end.on_message = lambda message: self._receive(end, message)
        end.on_end = lambda: self._ended(end)
        self._keepalive.watch(end)

    def _ended(self, end: End) -> None:
        self._keepalive.forget(end)
        rank, supervisor = self._ranks.pop(end, None), self._names.pop(end, None)
        if rank is not None and self.streams.get(rank) is end:
            del self.streams[rank]
        if supervisor is not None:
            self.supervisors.pop(supervisor[0], None)
            self.feed(events.SupervisorEnded(supervisor[0]))
        session = self._sessions.pop(end, None)
        if session is not None:
            self.feed(events.SessionEnded(session))

    def _end(self, end: End, last: Any) -> None:
        """A last word, and the end of that stream."""
        end.send(last)
        end.close()
        self.after(0, self._ended, end)

    def _receive(self, end: End, message: Any) -> None:
        rank = self._ranks.get(end)
        match message:
            case Entry():
                self._enter(end, message)
            case StepReport(step, phase) if rank is not None:
                self.feed(events.RankHeartbeat(rank, step, phase), end)
            case Ready(generation) if rank is not None:
                self.feed(events.RankReady(rank, generation), end)
            case Failure(generation, reason) if rank is not None:
                self.feed(events.RankFailed(rank, generation, reason), end)
            case Finish(generation) if rank is not None:
                self.feed(events.RankFinished(rank, generation), end)
            case KeyRequest():
                self._answer(end, message)
            case _:
                self._hear_supervisor(end, message)

    def _enter(self, end: End, entry: Entry) -> None:
        self._next_session += 1
        old = self.streams.get(entry.rank)
        if old is not None:  # a newer stream takes its place
            self._sessions.pop(old, None)
            self._ranks.pop(old, None)
            self._keepalive.forget(old)
            old.close()
        self._sessions[end] = self._next_session
        self._ranks[end] = entry.rank
        self.streams[entry.rank] = end
        self.checkers.entered(entry)
        self.feed(events.RankJoined(entry, self._next_session), end)
        if self.streams.get(entry.rank) is end and end.is_open:
            end.send(Welcome())

    def _hear_supervisor(self, end: End, message: Any) -> None:
        if isinstance(message, SupervisorEntry):
            self._next_session += 1
            self._names[end] = self._next_session, message
            self.supervisors[self._next_session] = end
            self.checkers.supervisor_entered(message.incarnation)
            self.feed(events.SupervisorJoined(message, self._next_session))
        if end not in self._names:
            return
        name, host = self._names[end][1].name, self._names[end][1].host
        match message:
            case WorkerLost(rank, reason, output):
                self.feed(events.RankLost(rank, reason, output, name))
            case StopAsked(reason):
                self.feed(events.StopAsked(reason, name))
            case HostExcluded(reason):
                self.feed(events.HostExcluded(host, reason))
            case _:
                pass

    # -- keys

    def _answer(self, end: End, request: KeyRequest) -> None:
        keys, value, error = self.machine.keys, request.value, None
        try:
            if request.value is None:
                value = keys.get(request.generation, request.kind, request.name)
            else:
                row = keys.put(request.generation, request.kind, request.name, request.value)
                self.site.rows[row[0], row[1], row[2]] = row
        except LighthouseError as refusal:
            error = refusal
        self.checkers.key_answered(request, value, error, self.machine.generations.life.number)
        end.send(KeyAnswer(request, value, error))

    # -- the operator

    def ask_stop(self, reason: str) -> None:
        self.feed(events.StopAsked(reason, "operator"))

    def ask_resume(self) -> None:
        self.feed(events.ResumeAsked())

    # -- the machine

    def feed(self, event: events.Event, end: End | None = None) -> None:
        now = self.clock()
        self.checkers.recount.begins(self.machine, event, now)
        self._perform(self.machine.handle(event, now), end, event)

    def _tick(self) -> None:
        now = self.clock()
        self.checkers.recount.begins(self.machine, None, now)
        self._perform(self.machine.tick(now), None, None)

    def pause(self, for_s: float) -> None:
        super().pause(for_s)
        self.after(for_s, self._wake, for_s)

    def _wake(self, for_s: float) -> None:
        self._keepalive.begin_anew()
        late_s = for_s * self.rate - self.world.random.uniform(0, PULSE_S)
        if late_s > PULSE_S:
            self.feed(events.WasLate(late_s))

    def _perform(self, effects: Sequence[events.Effect], end: End | None, event: events.Event | None) -> None:
        self.checkers.handled(self.machine, event)
        is_written = False
        for effect in effects:
            self._may_die()
            if isinstance(effect, events.RecordDue):
                self._write(effect.record, effects)
                is_written = True
            elif not (is_written and events.changes_record(effect)):
                self.checkers.effect(self.machine, effect)
            if isinstance(effect, events.GenerationFormed):
                self._fire_crash()
            self._may_die()
            self._carry(effect, end)
        now = self.clock()
        self.checkers.settled(self.machine, now)
        self._timer.set(self.machine.deadline(now))

    def _write(self, record: RunRecord, effects: Sequence[events.Effect]) -> None:
        """From now on it holds, whether it is told or not."""
        self.site.record = dump(record)
        self.checkers.written(record)
        for effect in filter(events.changes_record, effects):
            self.checkers.effect(self.machine, effect)

    def _carry(self, effect: events.Effect, end: End | None) -> None:
        match effect:
            case events.GenerationFormed(generation, spares):
                self.say(f"forms {generation.counters} of {[str(rank) for rank in generation.active]}")
                self._tell((*generation.active, *spares), Told(generation.counters, _slots(generation.active)))
            case events.GenerationTold(rank, generation):
                self._tell((rank,), Told(generation.counters, _slots(generation.active)))
            case events.Interrupted(number, reason, ranks):
                self.say(f"interrupts {number}: {reason}")
                self._tell(ranks, Over(number, reason))
            case events.RankRefused(rank, error):
                self.say(f"refuses {rank}: {error}")
                if end is not None:
                    self._end(end, Refusal(error))
            case events.Completed(number, ranks, is_new):
                self.say(f"{number} is completed")
                self._tell(ranks, Done(number))
                if is_new:
                    self._tell_supervisors(Done(number))
            case events.Stopped(stop, ranks, is_new):
                self.say(f"stops: {stop}")
                self._tell(ranks, stop)
                if is_new:
                    self._tell_supervisors(stop)
            case events.SupervisorTold(session, message):
                self._tell_supervisor(session, message)
            case events.RecordChanged():
                self._note()
            case events.Resumed() | events.RecordDue():
                pass

    def _note(self) -> None:
        """Not worth a write of its own."""
        if not self._has_notes:
            self._has_notes = True
            self.after(NOTED_WITHIN_S, self._write_notes)

    def _write_notes(self) -> None:
        self._has_notes = False
        self.site.record = dump(self.machine.record(self.clock()))

    def _tell(self, ranks: Sequence[RankId], message: Any) -> None:
        for rank in ranks:
            self._may_die()
            end = self.streams.get(rank)
            if end is not None:
                end.send(message)

    def _tell_supervisors(self, message: Any) -> None:
        for session in sorted(self.supervisors):
            self._may_die()
            self.supervisors[session].send(message)

    def _tell_supervisor(self, session: int, message: Any) -> None:
        end = self.supervisors.get(session)
        if end is not None:
            self._end(end, message) if isinstance(message, Refusal) else end.send(message)

    # -- its end

    def arm_crash(self, effects: int, patience_s: float) -> None:
        """It dies so many tellings after the next generation has formed; if none does in time, after any."""
        self._crash_after, self._is_armed = effects, True
        self.after(patience_s, self._fire_crash)

    def _fire_crash(self) -> None:
        if self._is_armed:
            self._crash_in, self._is_armed = self._crash_after, False

    def _may_die(self) -> None:
        if self._crash_in is None:
            return
        self._crash_in -= 1
        if self._crash_in < 0:
            self.world.counts["crashed while telling"] += 1
            self.site.kill(self.world.random.choice((0.05, 0.5, 2.0)))
            self.simulation.trouble(None, until=self.world.now + 2.0)
            raise Died


def _slots(active: Sequence[RankId]) -> tuple[int, ...]:
    return tuple(rank.slot for rank in active)
