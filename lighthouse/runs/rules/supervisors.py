"""The supervisors of a run, and its excluded hosts.

1. One entry a name, of its newest incarnation, kept after its connection. A newer incarnation takes the name, and the
   older one never gets it back. So of two supervisors that were given one name one goes on, and the other one ends.
2. A supervisor that was told a stop ends by it. If it comes again it is told so again, even after the stop was lifted.
3. An excluded host has no rank and no supervisor in the run until the run is resumed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lighthouse.runs.rules.record import SupervisorRecord
from lighthouse_protocol.messages.run_status import ExcludedHost
from lighthouse_protocol.messages.supervisor import SupervisorHello
from lighthouse_protocol.refusals import LighthouseError, LimitReached, Superseded, WrongState

MAX_SUPERVISORS = 4096
FORMER_KEPT = 16  # incarnations of one name
MAX_EXCLUDED = 4096


@dataclass(slots=True, eq=False)
class Supervisor:
    entry: SupervisorHello
    session: int | None = None
    former: tuple[str, ...] = ()


class Supervisors:
    def __init__(
        self,
        records: Iterable[SupervisorRecord] = (),
        excluded: Iterable[ExcludedHost] = (),
        ending: Mapping[str, str] | None = None,
    ) -> None:
        self._names = {record.hello.name: Supervisor(record.hello, former=record.former) for record in records}
        self._sessions: dict[int, Supervisor] = {}
        self._excluded = {host.host: host for host in excluded}
        self._ending = dict(ending or {})

    def __iter__(self) -> Iterator[Supervisor]:
        return iter(self._names.values())

    @property
    def is_empty(self) -> bool:
        """None was ever here."""
        return not self._names

    @property
    def are_connected(self) -> bool:
        return bool(self._sessions)

    @property
    def excluded(self) -> tuple[ExcludedHost, ...]:
        return tuple(self._excluded.values())

    @property
    def incarnations(self) -> tuple[str, ...]:
        """Of all that were ever here."""
        return tuple(one for each in self for one in (each.entry.incarnation, *each.former))

    def slots_of(self, replica_id: str) -> list[int]:
        """Those of the ranks of that replica group, in their order; on further hosts its supervisors have a number."""
        name = re.compile(rf"{re.escape(replica_id)}(/\d+)?")
        return sorted(slot for each in self if name.fullmatch(each.entry.name) for slot in each.entry.slots)

    def records(self) -> tuple[SupervisorRecord, ...]:
        return tuple(SupervisorRecord(each.entry, each.former) for each in self)

    # -- coming and going

    def refusal(self, entry: SupervisorHello) -> LighthouseError | None:
        """Why it may not come in."""
        known = self._names.get(entry.name)
        if known is not None and entry.incarnation in known.former:
            return _superseded(entry, known.entry)
        if known is None and len(self._names) >= MAX_SUPERVISORS:
            return LimitReached(f"name: {entry.name} would be supervisor {MAX_SUPERVISORS + 1} of this run")
        return self.why_excluded(entry.host or entry.name)

    def enter(self, entry: SupervisorHello, session: int) -> tuple[int, LighthouseError] | None:
        """Take it in; an older stream of that name that is to be ended, and why."""
        known = self._names.setdefault(entry.name, Supervisor(entry))
        older, before = known.session, known.entry
        if before.incarnation != entry.incarnation:
            known.former = (*known.former, before.incarnation)[-FORMER_KEPT:]
        known.entry, known.session = entry, session
        self._sessions[session] = known
        if older is None:
            return None
        del self._sessions[older]
        if before.incarnation == entry.incarnation:
            return older, Superseded(f"supervisor {entry.name} has come by another stream; this one ends")
        return older, _superseded(before, entry)

    def end(self, session: int) -> None:
        known = self._sessions.pop(session, None)
        if known is not None:
            known.session = None

    # -- stops

    @property
    def connected(self) -> set[str]:
        return {known.entry.incarnation for known in self._sessions.values()}

    @property
    def ending(self) -> Mapping[str, str]:
        """Incarnations, and the reason of the stop that each was told."""
        return dict(self._ending)

    def stop(self, reason: str, incarnations: Iterable[str]) -> bool:
        """They end by it. Whether that is new."""
        new = [each for each in sorted(incarnations) if each not in self._ending]
        self._ending |= dict.fromkeys(new, reason)
        for oldest in list(self._ending)[:-MAX_SUPERVISORS]:
            del self._ending[oldest]
        return bool(new)

    def stopped_by(self, incarnation: str) -> str | None:
        return self._ending.get(incarnation)

    def name_of(self, incarnation: str) -> str:
        """Of the supervisor with that incarnation, now or before; empty: none had it."""
        names = (each.entry.name for each in self if incarnation in (each.entry.incarnation, *each.former))
        return next(names, "")

    def incarnation_of(self, name: str) -> str:
        """Of the newest; empty: there is none."""
        known = self._names.get(name)
        return known.entry.incarnation if known is not None else ""

    # -- hosts

    def exclude(self, host: str, reason: str, at: float) -> bool:
        """Whether that is new."""
        if host in self._excluded or len(self._excluded) >= MAX_EXCLUDED:
            return False
        self._excluded[host] = ExcludedHost(host, reason, at)
        return True

    def why_excluded(self, host: str) -> WrongState | None:
        excluded = self._excluded.get(host)
        if excluded is None:
            return None
        return WrongState(
            f"host: {host} is excluded from this run: {excluded.reason}; "
            "repair it, and let it in again by `lighthouse resume`"
        )

    def lift(self) -> bool:
        """Let all hosts in again. Whether there was one to let in."""
        had, self._excluded = bool(self._excluded), {}
        return had


def _superseded(older: SupervisorHello, newer: SupervisorHello) -> Superseded:
    return Superseded(
        f"supervisor {older.name} on {older.host or 'an unnamed host'} has a successor of that name on "
        f"{newer.host or 'an unnamed host'}; end this one, or give each a --replica-group-id of its own"
    )
