"""A lighthouse told by lines of text; what it says, as lines of text.

lighthouse min_replicas=2 join_timeout=60s      settings, first line of a scenario
heartbeat a b                                   signs of life
join a b step=7 deadline=30s shrink_only        calls for a quorum, by a session where there is one; g[01-30] are thirty
withdraw a                                      its call ends without an answer
pass 60s heartbeating=(a,b) beating=(c)         time passes; each second a and b beat, and c by its session
status                                          the verdict in words

open a b holds=1 recalled granted=7             sessions; holds= after a restart: what they hold of which quorum
beat a recalled granted=7 drains down=crashed   what it says of the quorum that it holds, from now on
end a; leave a                                  its connection ends (session=1: an older one); it goes in good order
paused 10s                                      the lighthouse was paused, and acts now on what it should have seen
restart journal=lost                            another lighthouse; all connections have ended
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lighthouse.job import events
from lighthouse.job.forming import stragglers
from lighthouse.job.records import QuorumConfig, QuorumRecord, Verdict
from lighthouse.job.status import explain
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import LEFT, GroupReport, HeldQuorum, Hello, HoldState, QuorumOrder
from tests.lighthouse.builders import FAR, AnswersOnly, beat, group
from tests.lighthouse.sessions import native, pulse, secret_of

NAMES_SHOWN = 8
FIRST_ID_WITHOUT_JOURNAL = 1000
SHORT = {"tag": "tag_quorum_id", "failures": "commit_failures", "seen": "seen_quorum_id", "size": "group_world_size"}
LOOPBACK = {"address": "127.0.0.1:29512", "store_address": "127.0.0.1:29600"}


@dataclass
class _Manager:
    session: int
    incarnation: str
    levels: GroupReport
    seen: int = 0
    beats: int = 0


class Script:
    def __init__(self) -> None:
        self._machine = AnswersOnly(QuorumConfig())
        self._now = 0.0
        self._calls: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._said: list[str] = []
        self._managers: dict[str, _Manager] = {}
        self._by_session: dict[int, str] = {}
        self._record: QuorumRecord | None = None

    def tell(self, line: str) -> list[str]:
        """What is said to one line; to the last of a paragraph also why there is no quorum."""
        verb, *words = line.split()
        names = [name for word in words if "=" not in word and word not in FLAGS for name in _names(word)]
        options = dict(_options(words))
        self._said = []
        getattr(self, f"_{verb}")(names, options)
        return self._said

    def verdict(self) -> str:
        """Why there is no quorum, with names and times."""
        machine, decision = self._machine, self._machine.decision
        verdict = decision.verdict
        match verdict:
            case Verdict.FORMED | Verdict.NO_JOINS:
                return verdict.value
            case Verdict.WAITING_FOR_STRAGGLERS | Verdict.WAITING_FOR_MEMBERS:
                until = "" if decision.until is None else f", until {decision.until:g}s"
                names = [group.replica_id for group in stragglers(machine.job)]
                return f"no quorum: {verdict} ({_list(names)}){until}"
            case Verdict.TOO_FEW_PARTICIPANTS:
                return f"no quorum: {verdict} ({len(machine.joins.list_candidates())} of {machine.config.min_replicas})"
            case Verdict.WAITING_FOR_LOST_MEMBER:
                return f"no quorum: {verdict}, until {decision.until:g}s"
            case _:
                return f"no quorum: {verdict}"

    def _lighthouse(self, _: list[str], options: dict[str, object]) -> None:
        named = {
            f"{key}_s" if key.endswith(("timeout", "margin", "call")) else key: value for key, value in options.items()
        }
        self._machine = AnswersOnly(QuorumConfig(**named))

    def _heartbeat(self, names: list[str], options: dict[str, object]) -> None:
        for name in names:
            self._feed(beat(name, str(options.get("incarnation", "i1"))))

    def _join(self, names: list[str], options: dict[str, object]) -> None:
        deadline_at = self._now + float(options.pop("deadline", FAR))
        for name in names:
            call = len(self._names) + 1
            self._calls[name], self._names[call] = call, name
            manager = self._managers.get(name)
            who = group(name, **options) if manager is None else self._participant(name, options)
            self._feed(events.Joined(call, who, deadline_at, manager and manager.session))

    def _withdraw(self, names: list[str], _: dict[str, object]) -> None:
        for name in names:
            self._feed(events.Withdrawn(name, self._calls.pop(name)))

    def _pass(self, durations: list[str], options: dict[str, object]) -> None:
        until = self._now + _value(durations[0])
        while self._now < until:
            self._second(options)
            second = min(self._now + 1, until)
            while (due := self._machine.deadline(self._now)) is not None and due <= second:
                self._now = due
                self._say(self._machine.tick(due))
            self._now = second

    def _second(self, options: dict[str, object]) -> None:
        """What happens at the beginning of each second that passes."""
        self._heartbeat(options.get("heartbeating", ()), {})
        self._beat([name for name in options.get("beating", ()) if name in self._managers], {})

    # -- sessions

    def _open(self, names: list[str], options: dict[str, object]) -> None:
        for name in names:
            incarnation = str(options.get("incarnation", "i1"))
            levels = _levels(GroupReport(), options)
            seen = levels.held.quorum_id if levels.held else 0
            manager = self._managers[name] = _Manager(len(self._by_session) + 1, incarnation, levels, seen)
            self._by_session[manager.session] = name
            self._feed(
                events.SessionOpened(manager.session, Hello(self._participant(name, {}), levels, secret_of(name)))
            )

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
            self._feed(events.SessionEnded(int(str(session))))

    def _leave(self, names: list[str], _: dict[str, object]) -> None:
        for name in names:
            self._feed(events.Left(self._managers.pop(name).session))

    def _paused(self, durations: list[str], options: dict[str, object]) -> None:
        by_s = float(durations[0].removesuffix("s"))
        self._now += by_s
        self._feed(events.ProcessPaused(by_s))

    def _restart(self, _: list[str], options: dict[str, object]) -> None:
        record = None if options.get("journal") == "lost" else self._record
        config = self._machine.config
        if record is None:
            config = replace(config, first_quorum_id=FIRST_ID_WITHOUT_JOURNAL)
        until = self._now + config.lease_s
        self._machine = AnswersOnly(config, record=record, holders_until=until)
        self._managers = {}

    def _status(self, *_: object) -> None:
        self._said.append(explain(self._machine, self._now))

    def _feed(self, event: events.QuorumEvent) -> None:
        self._say(self._machine.handle(event, self._now))

    def _say(self, effects: list[events.QuorumEffect]) -> None:
        for effect in effects:
            match effect:
                case events.QuorumFormed(quorum, calls, is_new, stands, record):
                    assert [self._names[call] for call in calls] == [p.replica_id for p in quorum.participants]
                    how = f"{'' if is_new else ', as before'}{', stands' if stands else ''}"
                    self._tell(f"quorum {_shown(quorum)}{how}")
                    self._record = record or self._record
                    self._hand(quorum, calls, stands)
                case events.JobEnded(step, absent, record):
                    self._tell(f"the job has ended at step {step}; absent: {' '.join(absent) or '-'}")
                    self._record = record
                case events.JoinRefused(call, error):
                    self._tell(f"{self._names[call]} refused: {type(error).__name__}: {error}")
                case events.QuorumResent(quorum, call):
                    self._tell(f"{self._names[call]} is handed {quorum.quorum_id} again")
                    self._hand(quorum, (call,), True)
                case events.Ordered(order, sessions):
                    self._tell(f"to {self._list(sessions)}: {_order(order)}")
                case events.Welcomed(session, welcome) if welcome.order is not None:
                    self._tell(f"to {self._list((session,))}: {_order(welcome.order)}")
                case events.SessionRefused(session, error, reason):
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


FLAGS = {
    "shrink_only": {"shrink_only": True},
    "ranks_disagree": {"ranks_disagree": True},
    "loopback": LOOPBACK,
    "drains": {"drains": True},
    "continues": {"continues": True},
    "left": {"mode": HoldState.LEAVING, "down": LEFT},
    **{mode.value: {"mode": mode} for mode in HoldState},
}


def _options(words: list[str]) -> Iterator[tuple[str, object]]:
    for word in words:
        if word in FLAGS:
            yield from FLAGS[word].items()
        elif "=" in word:
            key, _, value = word.partition("=")
            yield SHORT.get(key, key), _value(value)


def _value(text: str) -> object:
    """60s, 7, (a,b,g[1-3]) or a word; {2,4} are sizes, - is nothing."""
    if text.startswith("("):
        return [name for word in text.strip("()").split(",") for name in _names(word)]
    if text.startswith("{"):
        return frozenset(int(size) for size in text.strip("{}").split(","))
    if re.fullmatch(r"[\d.]+s", text):
        return float(text[:-1])
    return int(text) if text.isdigit() else text.removeprefix("-")


def _names(word: str) -> list[str]:
    many = re.fullmatch(r"(\w+)\[(\d+)-(\d+)\]", word)
    if many is None:
        return [word]
    prefix, first, last = many.groups()
    return [f"{prefix}{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]


def _shown(quorum: Quorum) -> str:
    behind = [p for p in quorum.participants if p.step < _max_step(quorum.participants)]
    heals = f"; {_list([p.replica_id for p in behind])} to heal to {_max_step(quorum.participants)}" if behind else ""
    return f"{quorum.quorum_id}: {_list([p.replica_id for p in quorum.participants])}{heals}"


def _max_step(participants: tuple[Participant, ...]) -> int:
    return max(p.step for p in participants)


def _list(names: list[str]) -> str:
    if len(names) <= NAMES_SHOWN:
        return " ".join(names)
    return f"{names[0]} {names[1]} ... {names[-1]} ({len(names)})"


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


def _order(order: QuorumOrder) -> str:
    upto = f" up to {order.upto}" if order.upto else ""
    reason = f" ({order.reason})" if order.reason else ""
    return f"{order.quorum_id} {order.phase}{upto}{reason}"
