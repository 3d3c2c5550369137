"""The supervisors of a run, and its excluded hosts.

1. One entry a name, of its newest incarnation, kept after its connection. While its stream is open only the supervisor
   that shows its secret takes its place; after a restart of the lighthouse the name is kept for NAMES_KEPT_S. Then a
   newer incarnation takes the name, and the older one never gets it back. So of two supervisors that were given one
   name one goes on, and the other one ends. An incarnation is its supervisor's for good.
2. A supervisor that was told a stop ends by it. If it comes again it is told so again, even after the stop was lifted.
3. An excluded host has no rank and no supervisor in the run until the run is resumed.
4. What a supervisor asks for counts for the others if it has a part in the run: a rank of it has been in a generation,
   or its group in a quorum of the job, as the secrets show. What another one asks for is its own affair: a stop ends it
   alone, an exclusion keeps its own name from its host. Only where no part of the run stands yet may any one stop it.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from lighthouse.runs.rules.record import SupervisorRecord
from lighthouse_protocol.identity import group_of_supervisor
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.run_status import ExcludedHost
from lighthouse_protocol.messages.supervisor import SupervisorHeartbeat, SupervisorHello
from lighthouse_protocol.refusals import DuplicateReplica, LighthouseError, LimitReached, Superseded, WrongState
from lighthouse_protocol.rules.proof import digest_of, is_shown

MAX_SUPERVISORS = 4096
FORMER_KEPT = 16  # incarnations of one name
MAX_EXCLUDED = 4096


@dataclass(slots=True, eq=False)
class Supervisor:
    """`secret`: the digest of what it has shown; `entry` is without it. `is_awaited`: the lighthouse has restarted, and
    it has not come back. `refused`: incarnations that have asked for its name, or were told that the run has completed;
    they are of the launch that it is of. `has_part`: a rank of it has been in a generation of this launch."""

    entry: SupervisorHello
    session: int | None = None
    former: tuple[str, ...] = ()
    last: SupervisorHeartbeat = field(default_factory=SupervisorHeartbeat)
    secret: str = ""
    is_awaited: bool = False
    refused: tuple[str, ...] = ()
    has_part: bool = False


class Supervisors:
    def __init__(
        self,
        records: Iterable[SupervisorRecord] = (),
        excluded: Iterable[ExcludedHost] = (),
        ending: Mapping[str, str] | None = None,
        kept_until: float = -math.inf,
    ) -> None:
        """`kept_until`: until then the names of `records` are kept for their supervisors."""
        self._names = {
            each.hello.name: Supervisor(
                each.hello,
                former=each.former,
                secret=each.secret,
                is_awaited=True,
                refused=each.refused,
                has_part=each.has_part,
            )
            for each in records
        }
        self._slots = sum(len(each.entry.slots) for each in self._names.values())
        self._kept_until = kept_until
        self._sessions: dict[int, Supervisor] = {}
        self._excluded = {(host.host, host.supervisor): host for host in excluded}
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
        return tuple(one for each in self for one in (each.entry.incarnation, *each.former, *each.refused))

    def slots_of(self, replica_id: str) -> list[int]:
        """Those of the ranks of that replica group, in their order."""
        own = (each.entry for each in self if replica_id in (each.entry.name, group_of_supervisor(each.entry.name)))
        return sorted(slot for entry in own for slot in entry.slots)

    def records(self) -> tuple[SupervisorRecord, ...]:
        return tuple(
            SupervisorRecord(each.entry, each.former, each.secret, each.refused, each.has_part) for each in self
        )

    # -- coming and going

    def refusal(self, entry: SupervisorHello, now: float) -> LighthouseError | None:
        """Why it may not come in. DuplicateReplica: not now; the one of that name may be gone, and not missed yet."""
        known = self._names.get(entry.name)
        if known is not None and self._keeps(known, entry, now):
            return DuplicateReplica(
                f"supervisor {entry.name} is already running on {known.entry.host or 'an unnamed host'}; the one on "
                f"{entry.host or 'an unnamed host'} has the same name: end one of them, or give each its own "
                "--replica-id. If the first one died, the name is free as soon as the lighthouse has detected that"
            )
        if known is not None and entry.incarnation in known.former:
            return _superseded(entry, known.entry)
        if known is None and len(self._names) >= MAX_SUPERVISORS:
            return LimitReached(f"name: {entry.name} would be supervisor {MAX_SUPERVISORS + 1} of this run")
        slots = self._slots + len(entry.slots) - (len(known.entry.slots) if known is not None else 0)
        if slots > MAX_GROUP_WORLD_SIZE:
            return LimitReached(
                f"slots: with those of {entry.name} the supervisors of this run start {slots} ranks; at most "
                f"{MAX_GROUP_WORLD_SIZE}"
            )
        return self.why_excluded(entry.host or entry.name, entry.name)

    def is_impostor(self, entry: SupervisorHello) -> bool:
        """It comes with the incarnation of the one that has its name, and without the secret."""
        known = self._names.get(entry.name)
        is_named = known is not None and known.entry.incarnation == entry.incarnation
        return known is not None and is_named and bool(known.secret) and not is_shown(entry.secret, known.secret)

    def refuse(self, entry: SupervisorHello) -> bool:
        """It was not taken in. Whether it asked for a name that has another supervisor, and was not known."""
        known = self._names.get(entry.name)
        if known is None or entry.incarnation in (known.entry.incarnation, *known.former, *known.refused):
            return False
        known.refused = (*known.refused, entry.incarnation)[-FORMER_KEPT:]
        return True

    def _keeps(self, known: Supervisor, entry: SupervisorHello, now: float) -> bool:
        """Its name, or its incarnation, from another one."""
        if not known.secret or is_shown(entry.secret, known.secret):
            return False
        is_there = known.session is not None or (known.is_awaited and now < self._kept_until)
        return is_there or entry.incarnation == known.entry.incarnation

    def shift(self, by_s: float) -> None:
        """The lighthouse was paused: no supervisor could come back for that long."""
        self._kept_until += by_s

    def enter(
        self, entry: SupervisorHello, session: int, *, has_part: bool = False
    ) -> tuple[int, LighthouseError] | None:
        """Take it in; an older stream of that name that is to be ended, and why. `has_part`: a rank of it is in the
        present generation."""
        entry, secret = replace(entry, secret=""), digest_of(entry.secret)
        known = self._names.get(entry.name)
        self._slots += len(entry.slots) - (len(known.entry.slots) if known is not None else 0)
        known = known or self._names.setdefault(entry.name, Supervisor(entry))
        older, before = known.session, known.entry
        if before.incarnation != entry.incarnation:
            known.former = (*known.former, before.incarnation)[-FORMER_KEPT:]
        known.has_part = has_part or (known.has_part and known.secret == secret)
        known.entry, known.session, known.secret, known.is_awaited = entry, session, secret, False
        self._sessions[session] = known
        if older is None:
            return None
        del self._sessions[older]
        if before.incarnation == entry.incarnation:
            return older, Superseded(f"supervisor {entry.name} has come by another stream; this one ends")
        return older, _superseded(before, entry)

    def take_part(self, secrets: Collection[str]) -> None:
        """A generation has formed, of ranks that have shown these."""
        for each in self:
            each.has_part = each.has_part or each.secret in secrets

    def of_session(self, session: int) -> Supervisor | None:
        """None: it was not taken in, or has another stream by now."""
        return self._sessions.get(session)

    def hear(self, session: int, heartbeat: SupervisorHeartbeat) -> None:
        if (known := self._sessions.get(session)) is not None:
            known.last = heartbeat

    @property
    def budget_used(self) -> float:
        """Of the one that is connected, and has used up most of its restarts."""
        return max((known.last.budget_used for known in self._sessions.values()), default=0.0)

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

    def secret_of(self, name: str) -> str:
        """The digest of what that one has shown; empty: nothing, or there is none."""
        known = self._names.get(name)
        return known.secret if known is not None else ""

    def incarnation_of(self, name: str) -> str:
        """Of the newest; empty: there is none."""
        known = self._names.get(name)
        return known.entry.incarnation if known is not None else ""

    # -- hosts

    def exclude(self, host: str, reason: str, at: float, supervisor: str = "") -> bool:
        """`supervisor`: the only one that it holds for; empty: for all. Whether that is new."""
        if (host, supervisor) in self._excluded or len(self._excluded) >= MAX_EXCLUDED:
            return False
        self._excluded[host, supervisor] = ExcludedHost(host, reason, at, supervisor)
        return True

    def why_excluded(self, host: str, supervisor: str) -> WrongState | None:
        """`supervisor`: the name of the one that comes, or whose rank comes; empty: there is none."""
        excluded = self._excluded.get((host, "")) or self._excluded.get((host, supervisor))
        if excluded is None:
            return None
        whom = f" for {excluded.supervisor}" if excluded.supervisor else ""
        return WrongState(
            f"host: {host} is excluded from this run{whom}: {excluded.reason}; "
            "repair it, then re-admit it with `lighthouse resume`"
        )

    def lift(self) -> bool:
        """Let all hosts in again. Whether there was one to let in."""
        had, self._excluded = bool(self._excluded), {}
        return had


def _superseded(older: SupervisorHello, newer: SupervisorHello) -> Superseded:
    return Superseded(
        f"supervisor {older.name} on {older.host or 'an unnamed host'} has a successor of that name on "
        f"{newer.host or 'an unnamed host'}; end this one, or give each its own --replica-id"
    )
