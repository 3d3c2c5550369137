"""The lines that are about sessions, beside those of lighthouse_script.py.

open a b holds=1 recalled granted=7               sessions; holds= after a restart: what they hold of which quorum
join a step=8                                   by its session, where it has one
beat a recalled granted=7 drains down=crashed     what it says of the quorum that it holds, from now on
end a; leave a                                  its connection ends (session=1: an older one); it goes in good order
pass 60s beating=(a,b)                          time passes; they beat every second, as they did last
paused 10s                                      the lighthouse was paused, and acts now on what it should have seen
restart journal=lost                            another lighthouse; all connections have ended
"""

from dataclasses import dataclass, replace

from lighthouse.quorum.rules.events import (
    Effect,
    Joined,
    Left,
    Ordered,
    QuorumFormed,
    QuorumResent,
    SessionEnded,
    SessionOpened,
    SessionRefused,
    WasLate,
    Welcomed,
)
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import GroupReport, HeldQuorum, Hello, HoldState, QuorumOrder
from tests.lighthouse.builders import FAR, AnswersOnly
from tests.lighthouse.sessions import native, pulse
from tests.scenarios.lighthouse_script import LighthouseScript

FIRST_ID_WITHOUT_JOURNAL = 1000


@dataclass
class _Manager:
    session: int
    incarnation: str
    levels: GroupReport
    seen: int = 0
    beats: int = 0


class SessionScript(LighthouseScript):
    def __init__(self) -> None:
        super().__init__()
        self._managers: dict[str, _Manager] = {}
        self._by_session: dict[int, str] = {}
        self._record: QuorumRecord | None = None

    def _open(self, names: list[str], options: dict[str, object]) -> None:
        for name in names:
            incarnation = str(options.get("incarnation", "i1"))
            levels = _levels(GroupReport(), options)
            seen = levels.held.quorum_id if levels.held else 0
            manager = self._managers[name] = _Manager(len(self._by_session) + 1, incarnation, levels, seen)
            self._by_session[manager.session] = name
            self._feed(SessionOpened(manager.session, Hello(self._participant(name, {}), levels)))

    def _join(self, names: list[str], options: dict[str, object]) -> None:
        for name in names:
            manager = self._managers.get(name)
            if manager is None:
                super()._join([name], dict(options))
                continue
            call = len(self._names) + 1
            self._calls[name], self._names[call] = call, name
            self._feed(Joined(call, self._participant(name, options), FAR, manager.session))

    def _participant(self, name: str, options: dict[str, object]) -> Participant:
        manager = self._managers[name]
        fields = {"incarnation": manager.incarnation, "seen_quorum_id": manager.seen, "tag_quorum_id": manager.seen}
        return native(name, **(fields | options))

    def _beat(self, names: list[str], options: dict[str, object]) -> None:
        for name in names:
            manager = self._managers[name]
            manager.levels = _levels(manager.levels, options)
            manager.beats += 1
            self._feed(pulse(manager.session, manager.beats, **_fields(manager.levels)))

    def _end(self, names: list[str], options: dict[str, object]) -> None:
        for name in names:
            session = options.get("session") or self._managers.pop(name).session
            self._feed(SessionEnded(int(str(session))))

    def _leave(self, names: list[str], _: dict[str, object]) -> None:
        for name in names:
            self._feed(Left(self._managers.pop(name).session))

    def _second(self, options: dict[str, object]) -> None:
        super()._second(options)
        self._beat([name for name in options.get("beating", ()) if name in self._managers], {})

    def _paused(self, durations: list[str], options: dict[str, object]) -> None:
        by_s = float(durations[0].removesuffix("s"))
        self._now += by_s
        self._feed(WasLate(by_s))

    def _restart(self, _: list[str], options: dict[str, object]) -> None:
        record = None if options.get("journal") == "lost" else self._record
        config = self._machine.config
        if record is None:
            config = replace(config, first_quorum_id=FIRST_ID_WITHOUT_JOURNAL)
        until = self._now + config.lease_s
        self._machine = AnswersOnly(config, record=record, holders_until=until)
        self._managers = {}

    def _say(self, effects: list[Effect]) -> None:
        for effect in effects:
            super()._say([effect])
            match effect:
                case QuorumFormed(quorum, calls, _, stands, record):
                    self._record = record or self._record
                    self._hand(quorum, calls, stands)
                case QuorumResent(quorum, call):
                    self._tell(f"{self._names[call]} is handed {quorum.quorum_id} again")
                    self._hand(quorum, (call,), True)
                case Ordered(order, sessions):
                    self._tell(f"to {self._list(sessions)}: {_shown(order)}")
                case Welcomed(session, welcome) if welcome.order is not None:
                    self._tell(f"to {self._list((session,))}: {_shown(welcome.order)}")
                case SessionRefused(session, error, reason):
                    why = f"{type(error).__name__}: {error}" if error else reason
                    self._tell(f"{self._by_session[session]} is dismissed: {why}")
                case _:
                    pass

    def _hand(self, quorum: Quorum, calls: tuple[int, ...], stands: bool) -> None:
        step = max(participant.step for participant in quorum.participants)
        for call in calls:
            manager = self._managers.get(self._names[call])
            if manager is not None:
                held = HeldQuorum(quorum.quorum_id, HoldState.STANDING, step) if stands else None
                manager.seen, manager.levels = quorum.quorum_id, replace(manager.levels, held=held)

    def _tell(self, text: str) -> None:
        self._said.append(f"{self._now:g}s {text}")

    def _list(self, sessions: tuple[int, ...]) -> str:
        return " ".join(self._by_session[session] for session in sessions) or "nobody"


def _levels(before: GroupReport, options: dict[str, object]) -> GroupReport:
    """`before`, but for what is said now."""
    held = before.held
    if "holds" in options:
        held = HeldQuorum(int(str(options["holds"])), HoldState.STANDING, 0)
    if held is not None:
        mode = HoldState(options.get("mode", held.mode))
        held = HeldQuorum(held.quorum_id, mode, int(str(options.get("granted", held.granted))))
    return GroupReport(held, bool(options.get("drains", before.drains)), str(options.get("down", before.down)))


def _fields(levels: GroupReport) -> dict[str, object]:
    return {"held": levels.held, "drains": levels.drains, "down": levels.down}


def _shown(order: QuorumOrder) -> str:
    upto = f" up to {order.upto}" if order.upto else ""
    reason = f" ({order.reason})" if order.reason else ""
    return f"{order.quorum_id} {order.phase}{upto}{reason}"
