"""A lighthouse told by lines of text; what it says, as lines of text.

lighthouse min_replicas=2 join_timeout=60s      settings, first line of a scenario
heartbeat a b                                   signs of life
join a b step=7 deadline=30s shrink_only        calls for a quorum; g[01-30] are thirty groups
withdraw a                                      its call ends without an answer
pass 60s heartbeating=(a,b)                     time passes; they beat every second
status                                          the verdict in words
"""

import re
from collections.abc import Iterator

from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.events import Effect, Event, JoinRefused, QuorumFormed, Withdrawn
from lighthouse.quorum.rules.status import explain
from lighthouse.quorum.rules.verdict import Verdict
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import HoldState
from tests.lighthouse.builders import FAR, AnswersOnly, beat, group, join

NAMES_SHOWN = 8
SHORT = {"tag": "tag_quorum_id", "failures": "commit_failures", "seen": "seen_quorum_id", "size": "group_world_size"}
LOOPBACK = {"address": "127.0.0.1:29512", "store_address": "127.0.0.1:29600"}


class LighthouseScript:
    def __init__(self) -> None:
        self._machine = AnswersOnly(QuorumConfig())
        self._now = 0.0
        self._calls: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._said: list[str] = []

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
        machine, verdict = self._machine, self._machine.verdict()
        at = machine.missed_at()
        match verdict:
            case Verdict.FORMED | Verdict.NO_JOINS:
                return verdict.value
            case Verdict.WAITING_FOR_STRAGGLERS | Verdict.WAITING_FOR_MEMBERS:
                until = "" if at is None else f", until {at:g}s"
                return f"no quorum: {verdict} ({_list(machine.stragglers())}){until}"
            case Verdict.TOO_FEW_PARTICIPANTS:
                return f"no quorum: {verdict} ({len(machine.joins.list_candidates())} of {machine.config.min_replicas})"
            case Verdict.WAITING_FOR_LOST_MEMBER:
                return f"no quorum: {verdict}, until {machine.last_call_until:g}s"
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
            self._feed(join(call, group(name, **options), deadline_at))

    def _withdraw(self, names: list[str], _: dict[str, object]) -> None:
        for name in names:
            self._feed(Withdrawn(self._calls.pop(name)))

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
        for name in options.get("heartbeating", ()):
            self._feed(beat(name))

    def _status(self, *_: object) -> None:
        self._said.append(explain(self._machine, self._now))

    def _feed(self, event: Event) -> None:
        self._say(self._machine.handle(event, self._now))

    def _say(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case QuorumFormed(quorum, calls, is_new, stands):
                    assert [self._names[call] for call in calls] == [p.replica_id for p in quorum.participants]
                    how = f"{'' if is_new else ', as before'}{', stands' if stands else ''}"
                    self._said.append(f"{self._now:g}s quorum {_shown(quorum)}{how}")
                case JoinRefused(call, error):
                    self._said.append(f"{self._now:g}s {self._names[call]} refused: {type(error).__name__}: {error}")
                case _:
                    pass


FLAGS = {
    "shrink_only": {"shrink_only": True},
    "ranks_disagree": {"ranks_disagree": True},
    "loopback": LOOPBACK,
    "drains": {"drains": True},
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
