"""One rank's life, event by event, as text.

    running                          told generation 0 of three ranks; `ready`: it waits to be told; `idle`: it starts
    GenerationEnded(0, 'slot 2 is lost')        what happens: an event, or a message of the lighthouse
        Interrupt(reason='slot 2 is lost')
    later 2.5                        time passes, deadline by deadline

Below each line is all that is done. `breaks`: the stream does, as if the lighthouse were down."""

import dataclasses
from pathlib import Path

import pytest

from agent_client.restart.rules import events
from agent_client.restart.rules.events import (
    Connect,
    MessageReceived,
    RankConfig,
    RankEffect,
    RankEvent,
    Send,
    StreamClosed,
)
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol import refusals
from lighthouse_protocol.messages import run
from lighthouse_protocol.messages.run import RankHello, RankId, RunTerms
from lighthouse_protocol.refusals import DuplicateReplica, Unreachable
from tests.scenarios.paragraphs import scenarios_of

FILE = Path(__file__).with_name("scenarios.txt")
NAMES = vars(refusals) | vars(run) | {
    each.__name__: each
    for each in (events.Closing, events.Raised, events.Returned, events.StepDone, events.Waiting, MessageReceived)
}  # fmt: skip
BEGINNINGS = {
    "idle": (),
    "ready": ("Waiting()",),
    "running": ("Waiting()", "GenerationFormed(RunCounters(0), (0, 1, 2))"),
}
HELLO = RankHello(RankId(1, "i"), RunTerms(3), attempt=2, host="h", pid=7)
QUIET = {"beat_interval_s": 1000.0, "interrupt_interval_s": 1.0, "hard_timeout_s": 5.0, "lighthouse_timeout_s": 60.0}


class Life:
    """A machine and its stream number."""

    def __init__(self, **config: float) -> None:
        self.machine = RankMachine(HELLO, RankConfig(**{**QUIET, **config}))  # pyright: ignore[reportArgumentType]
        self.now = 0.0
        self.session = 1
        assert self.machine.start(self.now) == [Connect(1), Send(1, HELLO)]

    def do(self, line: str) -> list[RankEffect]:
        match line.split():
            case ["later", by_s]:
                return self.later(float(by_s))
            case ["breaks"]:
                return self.handle(StreamClosed(self.session, Unreachable("down"), jitter=0.5))
        said = eval(line, NAMES)  # of a file of ours
        known = isinstance(said, RankEvent)
        return self.handle(said if known else MessageReceived(self.session, said))

    def handle(self, event: RankEvent) -> list[RankEffect]:
        return self._checked(list(self.machine.handle(event, self.now)))

    def later(self, by_s: float) -> list[RankEffect]:
        effects: list[RankEffect] = []
        until = self.now + by_s
        while (at := self.machine.deadline(self.now)) is not None and at <= until:
            self.now = at
            effects += self._checked(list(self.machine.tick(self.now)))
        self.now = until
        return effects

    def _checked(self, effects: list[RankEffect]) -> list[RankEffect]:
        deadline = self.machine.deadline(self.now)
        assert deadline is None or deadline > self.now
        self.session = max([self.session, *(effect.session for effect in effects if isinstance(effect, Connect))])
        assert all(effect.session == self.session for effect in effects if isinstance(effect, Send))
        return effects


def shown(effect: RankEffect) -> str:
    if not isinstance(effect, Send):
        return repr(effect)
    message = effect.message
    if not isinstance(message, RankHello):
        return f"send {message}"
    names = [field.name for field in dataclasses.fields(message)]
    new = [name for name in names if getattr(message, name) != getattr(HELLO, name)]
    return " ".join(["send hello", *(f"{name}={getattr(message, name)}" for name in new)])


def play(paragraph: str) -> str:
    """The same paragraph, with what is so below each line."""
    lines: list[str] = []
    life = Life()
    for line in paragraph.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        beginning, *options = line.split()
        if beginning in BEGINNINGS:
            life = Life(**{name: float(value) for name, _, value in (option.partition("=") for option in options)})
            for each in BEGINNINGS[beginning]:
                life.do(each)
        elif not line.startswith("#"):
            lines += [f"    {shown(effect)}" for effect in life.do(line)]
    return "\n".join(lines)


@scenarios_of(FILE, play)
def test_what_is_done(paragraph: str) -> None:
    assert play(paragraph).splitlines() == paragraph.splitlines()


def test_the_delay_doubles_up_to_a_limit_and_begins_anew() -> None:
    life = Life()

    def delay() -> float:
        life.do("breaks")
        at = life.machine.deadline(life.now)
        assert at is not None
        waited = at - life.now
        life.later(waited)
        return waited

    assert [pytest.approx(delay()) for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    life.do("RankWelcome()")
    assert delay() == pytest.approx(0.05)


def test_a_slot_that_is_taken_is_asked_for_until_its_predecessor_must_be_missed() -> None:
    life = Life()
    taken = DuplicateReplica("slot: 1 is that of pid 3")
    for _ in range(200):
        effects = life.handle(MessageReceived(life.session, run.HelloRejected(taken)))
        if events.Ended(taken) in effects:
            break
        life.later(4.0)
    assert 45 <= life.now < 55


def test_one_that_is_taken_again_later_is_asked_for_as_long() -> None:
    life = Life()
    taken = DuplicateReplica("slot: 1 is that of pid 3")
    for _ in range(3):
        life.handle(MessageReceived(life.session, run.HelloRejected(taken)))
        life.later(4.0)
        life.do("RankWelcome()")
        life.later(40.0)
        life.do("breaks")
        life.later(4.0)
    assert not life.machine.has_ended


def test_a_rank_that_runs_does_not_need_a_lighthouse() -> None:
    life = Life()
    for line in (*BEGINNINGS["running"], "RankWelcome()"):
        life.do(line)
    for _ in range(100):
        life.do("breaks")
        assert not [effect for effect in life.later(4.0) if isinstance(effect, events.Ended | events.Interrupt)]
