"""When ranks are started, stopped and started again, as text.

    hosts=2 nproc=2 max_restarts=1      the layout and the policy, all hosts ready at 0; `waiting`: none is
    50 RankEnded(1, 0, 1, 'boom')
        Halt(host=0, ranks=(0,), grace_s=5.0)
        until 51

A moment, its events (`tick`: none), and below it all that is done then. `until`: when to call tick next.
"""

from pathlib import Path

from manager.supervisor.rules import events
from manager.supervisor.rules.events import Effect, HostReady
from manager.supervisor.rules.machine import Layout, SupervisorMachine
from manager.supervisor.rules.restart_policy import RestartPolicy
from tests.scenarios.paragraphs import scenarios_of

FILE = Path(__file__).with_name("scenarios.txt")


def made(line: str) -> SupervisorMachine:
    words = line.split()
    options = {name: value(text) for name, has, text in (word.partition("=") for word in words) if has}
    layout = Layout(options.pop("hosts", 1), options.pop("nproc", 1))
    policy = RestartPolicy(**{"max_startup_failures": 0, "delay_s": 1.0, **options})
    machine = SupervisorMachine(layout, policy, lambda: 1.0, grace_s=5.0, host_timeout_s=100.0)
    if "waiting" not in words:
        for host in range(layout.hosts):
            machine.handle(HostReady(host), 0.0)
    return machine


def value(text: str) -> object:
    return eval(text, vars(events))  # of a file of ours


def done(machine: SupervisorMachine, line: str) -> str:
    at, _, what = line.partition(" ")
    effects: list[Effect] = []
    for word in what.split("; "):
        effects += machine.tick(float(at)) if word == "tick" else machine.handle(value(word), float(at))
    shown = [effect.text if isinstance(effect, events.Logged) else repr(effect) for effect in effects]
    return "".join(f"\n    {each}" for each in shown) + (
        "" if machine.deadline() is None else f"\n    until {machine.deadline():g}"
    )


def play(paragraph: str) -> str:
    """The same paragraph, with what is so below each moment."""
    lines: list[str] = []
    machine = made("")
    for line in paragraph.splitlines():
        if line.startswith("    "):
            continue
        if line[:1].isdigit():
            lines.append(line + done(machine, line))
        else:
            lines.append(line)
            machine = machine if line.startswith("#") else made(line)
    return "\n".join(lines)


@scenarios_of(FILE, play)
def test_what_is_done(paragraph: str) -> None:
    assert play(paragraph).splitlines() == paragraph.splitlines()
