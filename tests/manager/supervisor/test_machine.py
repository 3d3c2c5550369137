"""When ranks are started, stopped and started again, as text.

    hosts=2 nproc=2 max_restarts=1      the layout and the policy, all hosts ready at 0; `waiting`: none is
    50 RankEnded(1, 0, 1, 'boom')
        Halt(host=0, ranks=(0,), grace_s=5.0)
        until 51

A moment, its events (`tick`: none), and below it all that is done then. `until`: when to call tick next.
"""

from pathlib import Path
from typing import Any

from manager.supervisor.rules import events
from manager.supervisor.rules.events import Effect, HostReady
from manager.supervisor.rules.machine import Layout, SupervisorMachine
from manager.supervisor.rules.restart_policy import RestartPolicy
from tests.manager.scripts import player
from tests.scenarios.paragraphs import scenarios_of


class Group:
    """That the text tells."""

    def __init__(self, line: str) -> None:
        words = line.split()
        options = {name: value(text) for name, has, text in (word.partition("=") for word in words) if has}
        layout = Layout(options.pop("hosts", 1), options.pop("nproc", 1))
        policy = RestartPolicy(**{"max_startup_failures": 0, "delay_s": 1.0, **options})
        self.machine = SupervisorMachine(layout, policy, lambda: 1.0, grace_s=5.0, host_timeout_s=100.0)
        if "waiting" not in words:
            for host in range(layout.hosts):
                self.machine.handle(HostReady(host), 0.0)

    def tell(self, line: str) -> list[str]:
        at, _, what = line.partition(" ")
        effects: list[Effect] = []
        for word in what.split("; "):
            effects += self.machine.tick(float(at)) if word == "tick" else self.machine.handle(value(word), float(at))
        shown = [effect.text if isinstance(effect, events.Logged) else repr(effect) for effect in effects]
        due = self.machine.deadline()
        return shown if due is None else [*shown, f"until {due:g}"]


def value(text: str) -> Any:
    return eval(text, vars(events))  # of a file of ours


play = player(lambda line: None if line[0].isdigit() else Group(line))


@scenarios_of(Path(__file__).with_name("scenarios.txt"), play)
def test_what_is_done(paragraph: str) -> None:
    assert play(paragraph).splitlines() == paragraph.splitlines()
