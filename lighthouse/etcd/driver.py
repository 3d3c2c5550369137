"""One candidate: its machine is fed, its requests are sent, one timer is set again. Synchronous: time and the store are
ports."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from lighthouse.etcd.rules import events
from lighthouse.etcd.rules.candidate import Candidate, CandidateConfig, CandidateStatus
from lighthouse.etcd.rules.leader import Leader
from lighthouse_protocol.refusals import NotLeader
from lighthouse_runtime import log_event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer

log = logging.getLogger(__name__)

Request = (
    events.ReadLeader | events.GrantLease | events.Claim | events.LoadRecords | events.RenewLease | events.RevokeLease
)


class LeaderStore(Protocol):
    def send(self, request: Request) -> None:
        """Begin it, and feed the driver its answer, or RequestFailed, later. Nothing is raised."""
        ...


class LeadershipDriver:
    """`began` is called with the term and the revision that guards writes; `ended` with the reason, before anything
    else can leave this process; `changed` when another leader is known."""

    def __init__(
        self,
        config: CandidateConfig,
        timers: Timers,
        store: LeaderStore,
        began: Callable[[int, int], None],
        ended: Callable[[str], None],
        changed: Callable[[Leader | None], None] = lambda leader: None,
    ) -> None:
        self._clock = timers.time
        self.candidate = Candidate(config, self._clock())
        self._store = store
        self._began = began
        self._ended = ended
        self._changed = changed
        self._timer = DeadlineTimer(self.tick, timers)
        self._has_failed = False

    def start(self) -> None:
        self.tick()

    def feed(self, event: events.Event) -> None:
        if isinstance(event, events.RequestFailed):
            if not self._has_failed:
                log.warning("store: %s", event.reason, extra=log_event.event("store_unavailable"))
            self._has_failed = True
        elif self._has_failed and not isinstance(event, events.WriteRefused | events.Resigned):
            self._has_failed = False
            log.info("store: available again", extra=log_event.event("store_available"))
        self._perform(self.candidate.handle(event, self._clock()))

    def tick(self) -> None:
        self._perform(self.candidate.tick(self._clock()))

    def refusal(self) -> NotLeader | None:
        """What each caller is told at this moment; None: this lighthouse leads. Asked at each act, so nothing happens
        in here: an end that is due is its timer's."""
        return self.candidate.refusal(self._clock())

    def status(self) -> CandidateStatus:
        return self.candidate.status(self._clock())

    def resign(self) -> None:
        """For good: another lighthouse may lead at once."""
        self.feed(events.Resigned())
        self._timer.cancel()

    def _perform(self, effects: Sequence[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.LeadershipBegan(term, revision):
                    log.info(
                        "this lighthouse leads, in term %d", term, extra=log_event.event("leadership_began", term=term)
                    )
                    self._began(term, revision)
                case events.LeadershipEnded(reason):
                    log.warning(
                        "this lighthouse no longer leads: %s", reason, extra=log_event.event("leadership_ended")
                    )
                    self._ended(reason)
                case events.LeaderChanged(leader):
                    if leader is not None:
                        fields = log_event.event("leader_changed", leader=leader.address, term=leader.term)
                        log.info(
                            "this lighthouse follows %s, which leads in term %d",
                            leader.address,
                            leader.term,
                            extra=fields,
                        )
                    self._changed(leader)
                case _:
                    self._store.send(effect)
        self._timer.set(self.candidate.deadline())
