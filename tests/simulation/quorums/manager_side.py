"""A rank's side of its manager: the watch, and one call at a time that may be withdrawn or get no answer."""

from typing import TYPE_CHECKING, Any

from agent_client.step.rules.machine import Phase, StepMachine
from lighthouse_protocol.refusals import Unreachable
from tests.simulation.network import LOCAL_DELAY_S
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.manager import ManagerProcess
    from tests.simulation.quorums.torchft_manager import TorchftManager

RECONNECT_S = 0.2
CRASHES_AFTER_S = (0.0, 0.0004, 0.001, 0.01)
CANCELLED_AFTER_S = (0.0001, 0.0005, 0.02, 0.3)


class ManagerSide(Process):
    """`token` numbers the calls: an answer to another than the present one is late, and nothing."""

    def __init__(self, site: "Group", group_rank: int, machine: StepMachine) -> None:
        super().__init__(site.world, f"{site.name}.{group_rank}", site.host)
        self.site = site
        self.machine = machine
        self.token = 0
        self.watch = 0
        self._called = -1  # the last call
        self._has_started = False
        self.after(LOCAL_DELAY_S, self.watch_again)

    @property
    def manager(self) -> "ManagerProcess | TorchftManager":
        return self.site.manager

    @property
    def quorum_id(self) -> int:
        raise NotImplementedError

    def begin_step(self) -> None:
        raise NotImplementedError

    def on_refused(self, token: int, error: Exception) -> None:
        raise NotImplementedError

    def on_revoked(self, quorum_id: int) -> None:
        raise NotImplementedError

    # -- the watch

    def _watch(self) -> None:
        self.world.at(self.world.now + LOCAL_DELAY_S, self.manager, self.manager.on_watch, self)

    def watch_again(self) -> None:
        """Once its manager is back."""
        if self.manager.is_up:
            self._watch()
        else:
            self.after(RECONNECT_S, self.watch_again)

    def on_watched(self, manager: "ManagerProcess | TorchftManager") -> None:
        if not self._has_started:
            self._has_started = True
            self.begin_step()

    def on_watch_end(self) -> None:
        """It revokes what this rank holds; the next one is opened a little later."""
        self.on_revoked(self.quorum_id)
        self.after(self.world.random.uniform(0.05, 0.5), self._watch)

    # -- calls

    def call_manager(self, method: str, timeout_s: float, *args: Any) -> None:
        self.token += 1
        self._called = self.token
        manager = self.manager
        if not manager.is_up:
            return self.after(RECONNECT_S, self.on_refused, self.token, Unreachable("the manager is gone"))
        at = self.world.now + LOCAL_DELAY_S * self.world.random.uniform(0.3, 3)
        if self.site.doubles and not manager.is_torchft and not self.world.is_calm:
            self.site.doubles -= 1
            second_at = at + LOCAL_DELAY_S * self.world.random.uniform(-0.5, 0.5)
            self.world.at(second_at, manager, getattr(manager, method), self, -self.token, timeout_s, *args)
        self.world.at(at, manager, getattr(manager, method), self, self.token, timeout_s, *args)
        self.after(timeout_s + 1, self._lost_call, self.token)
        if self.machine.phase is self.site.crashes_in and not self.world.is_calm:
            self.world.after(self.world.random.choice(CRASHES_AFTER_S), self.site.crash)
            self.site.crashes_in = None
        if self.machine.phase in self.site.cancels and not self.world.is_calm:
            self.site.cancels.remove(self.machine.phase)
            self.after(self.world.random.choice(CANCELLED_AFTER_S), self._cancel_if_waiting, self.token)
        return None

    def end_call(self, error: Exception) -> None:
        """With the connection that it was on."""
        if self._called == self.token:
            self.on_refused(self.token, error)

    def _cancel_if_waiting(self, token: int) -> None:
        if token == self.token:
            self.world.counts["calls cancelled"] += 1
            self.cancel("cancelled")

    def _lost_call(self, token: int) -> None:
        """The manager answers in time, unless it is paused or gone."""
        if token == self.token and self.machine.phase in (Phase.ASKED, Phase.VOTED):
            self.cancel("no answer in time")

    def cancel(self, reason: str) -> None:
        """The call that waits ends without an answer."""
        token = self.token
        manager = self.manager
        self.world.at(self.world.now + LOCAL_DELAY_S, manager, manager.on_cancel, self, token)
        self.on_refused(token, TimeoutError(reason))
