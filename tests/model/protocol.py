"""The protocol as a model: guards and effects of actions, written from docs/contributing/protocol.md alone.

An action `name` has a guard `can_name` and an effect `name`; both take a World. Faults have a budget. No clock: a lease
or a patience may end at any moment, except that the lighthouse counts a lease as over only after its manager does (the
assumption about clocks). A heartbeat and its answer are one action. A quorum that has formed is written, sent and
received in actions of their own, since a process may die between them.

`weak` names rules to leave out (defects.py). The checks of S1 to S14 are in the effects, and never weakened.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tests.model.state import (
    COMPUTES,
    HAS_SUM,
    HEALS,
    JOINING,
    LATE,
    NO_QUORUM,
    NOTHING,
    RECALLED,
    RESUMED,
    RETURNING,
    REVOKED,
    STANDS,
    Group,
    Join,
    Lighthouse,
    Quorum,
    Report,
    World,
    has_late,
    is_late,
    new_lighthouse,
    new_world,
)

NAMES = "abcdefghijklmnopqrstuvwxyz"

FAULTS: tuple[str, ...] = (
    "kill",
    "vanish",
    "restart_manager",
    "stop_lighthouse",
    "roll_back",
    "cut",
    "fail",
    "miss",
    "skip",
    "drain",
)
KILL, VANISH, RESTART_MANAGER, STOP, ROLL_BACK, CUT, FAIL, MISS, SKIP, DRAIN = range(len(FAULTS))
HARMLESS = (DRAIN,)
"""No fault: a group may leave at any time."""


class Action(NamedTuple):
    name: str
    of: str  # its arguments: g for a group, l for a lighthouse, q for a quorum
    fault: int | None = None


ACTIONS = (
    Action("kill_group", "g", KILL),
    Action("reload_group", "g", KILL),
    Action("vanish", "g", VANISH),
    Action("restart_manager", "g", RESTART_MANAGER),
    Action("stop_lighthouse", "l", STOP),
    Action("roll_back", "", ROLL_BACK),
    Action("cut", "g", CUT),
    Action("fail", "g", FAIL),
    Action("miss_beat", "g", MISS),
    Action("form_without_stragglers", "l", MISS),
    Action("break_heal", "g", FAIL),
    Action("commit_unapplied", "g", SKIP),
    Action("drain", "g", DRAIN),
    Action("start", "l"),
    Action("arrive", ""),
    Action("connect", "gl"),
    Action("beat", "g"),
    Action("expire", "g"),
    Action("lose", "lg"),
    Action("lease_ends", "lg"),
    Action("stop_returning", "l"),
    Action("ask", "g"),
    Action("form", "l"),
    Action("write", "l"),
    Action("tell", "lg"),
    Action("take", "g"),
    Action("heal", "g"),
    Action("reduce", "q"),
    Action("commit", "g"),
    Action("discard", "g"),
    Action("grant", "g"),
    Action("leave", "g"),
    Action("give_up", "g"),
)
BY_NAME = {action.name: action for action in ACTIONS}


class Model:
    def __init__(
        self,
        groups: int,
        last_step: int,
        left: Mapping[str, int],
        *,
        lighthouses: int = 1,
        delays_writes: bool = False,
        quorums: int = 6,
        weak: Iterable[str] = (),
        promises: Iterable[str] = (),
    ) -> None:
        """`promises`: checks these alone; all, if it names none."""
        unknown = left.keys() - set(FAULTS)
        assert not unknown, unknown
        self.last_step = last_step
        self.left = tuple([left.get(kind, 0) for kind in FAULTS])
        self.delays_writes = delays_writes
        self.most_quorums = quorums
        self.weak = frozenset(weak)
        self.promises = frozenset(promises)
        self.checked: Counter[str] = Counter()
        self.broken = ""
        self.first = new_world(groups, lighthouses, self.left)
        self._contents: dict[tuple[int, int, int], int] = {}
        self._arguments: dict[str, tuple[tuple[int, ...], ...]] = {"": ((),)}
        self._arguments["g"] = tuple((g,) for g in range(groups))
        self._arguments["l"] = tuple((n,) for n in range(lighthouses))
        self._arguments["gl"] = tuple((g, n) for g in range(groups) for n in range(lighthouses))
        self._arguments["lg"] = tuple((n, g) for g in range(groups) for n in range(lighthouses))
        self._bound = [(a, getattr(self, f"can_{a.name}"), getattr(self, a.name)) for a in ACTIONS]

    # -- for the explorer

    def moves(self, state: tuple[Any, ...]) -> Iterator[tuple[Action, tuple[int, ...], tuple[Any, ...]]]:
        """Yield each action that `state` allows, and the state after it. After a violation `broken` names it."""
        world = World(state)
        last = len(world.quorums)
        quorums = tuple((k,) for k in range(max(0, last - 3), last))
        for action, can, act in self._bound:
            if action.fault is not None and not world.left[action.fault]:
                continue
            for args in quorums if action.of == "q" else self._arguments[action.of]:
                if can(world, *args):
                    after = World(state)
                    self._pay(after, action)
                    act(after, *args)
                    yield action, args, after.freeze()

    def do(self, world: World, name: str, *args: int) -> bool:
        """Do one action. Return False if its guard forbids it."""
        action = BY_NAME[name]
        if not getattr(self, f"can_{name}")(world, *args):
            return False
        self._pay(world, action)
        getattr(self, name)(world, *args)
        return True

    def _pay(self, world: World, action: Action) -> None:
        if action.fault is not None:
            left = list(world.left)
            left[action.fault] -= 1
            world.left = tuple(left)

    def _check(self, promise: str, *, holds: bool, text: str) -> None:
        self.checked[promise] += 1
        if not holds and not self.broken and (not self.promises or promise in self.promises):
            self.broken = f"{promise} {text}"

    def _spent(self, world: World) -> list[int]:
        """Count the faults so far, by kind."""
        return [0 if kind in HARMLESS else self.left[kind] - world.left[kind] for kind in range(len(FAULTS))]

    # -- faults of groups

    def can_kill_group(self, w: World, g: int) -> bool:
        return not w.groups[g].has_left

    def kill_group(self, w: World, g: int) -> None:
        """All processes die, and new ones begin with step 0."""
        self._leave_part(w, g)
        group = w.groups[g]
        group.forget()
        group.step = group.tag = group.content = 0
        group.is_torn = group.has_failed = False
        group.work = ()

    def can_reload_group(self, w: World, g: int) -> bool:
        return not w.groups[g].has_left and w.groups[g].step > 0 and not w.groups[g].is_torn

    def reload_group(self, w: World, g: int) -> None:
        """The same, and the new ones load the checkpoint of the last committed step."""
        self._leave_part(w, g)
        group = w.groups[g]
        group.forget()
        group.has_failed, group.work = False, ()

    def can_vanish(self, w: World, g: int) -> bool:
        return sum(not group.has_left for group in w.groups) > 1 and not w.groups[g].has_left

    def vanish(self, w: World, g: int) -> None:
        """All processes die for good. No connection ends."""
        self.kill_group(w, g)
        w.groups[g].has_left = True

    def can_restart_manager(self, w: World, g: int) -> bool:
        return not w.groups[g].has_left

    def restart_manager(self, w: World, g: int) -> None:
        """Its ranks live on. A rank that has voted yes repeats that; others give up their step."""
        group = w.groups[g]
        group.forget()
        if group.work and group.work[2] != HAS_SUM:
            self._give_up_step(w, g)

    def can_cut(self, w: World, g: int) -> bool:
        return w.groups[g].link != NOTHING

    def cut(self, w: World, g: int) -> None:
        """The connection breaks, and the lighthouse notices later. An answer that is under way may still arrive."""
        w.groups[g].link = NOTHING

    def can_fail(self, w: World, g: int) -> bool:
        return bool(w.groups[g].work) or w.groups[g].mode in (STANDS, RECALLED, RESUMED)

    def fail(self, w: World, g: int) -> None:
        """A rank votes no, perhaps after the all-reduce completed for others; or it is lost between two steps."""
        if w.groups[g].work:
            self._give_up_step(w, g)
        w.groups[g].mode = REVOKED if w.groups[g].mode != NO_QUORUM else NO_QUORUM

    def can_break_heal(self, w: World, g: int) -> bool:
        work = w.groups[g].work
        return bool(work) and work[2] == HEALS

    def break_heal(self, w: World, g: int) -> None:
        """A heal fails during the install, or for some of the ranks: the group holds no state."""
        group = w.groups[g]
        if "broken_heal_unnoticed" in self.weak and self.can_heal(w, g):
            self.heal(w, g)
            group.content = 0
            return
        group.step, group.tag, group.content, group.is_torn = 0, 0, 0, True
        self.fail(w, g)

    def can_drain(self, w: World, g: int) -> bool:
        return not w.groups[g].drains and sum(not group.drains for group in w.groups) > 1

    def drain(self, w: World, g: int) -> None:
        w.groups[g].drains = True

    def can_leave(self, w: World, g: int) -> bool:
        group = w.groups[g]
        return group.drains and not group.has_left and self.may_ask(group)

    def leave(self, w: World, g: int) -> None:
        group = w.groups[g]
        if w.serves(group.link):
            lighthouse = w.lighthouses[group.link]
            lighthouse.session[g], lighthouse.joins[g], lighthouse.untold[g] = NOTHING, None, False
            if w.is_member(lighthouse.quorum, g) and lighthouse.phase in (STANDS, RECALLED):
                self._revoke(lighthouse)
        group.forget()
        group.has_left, group.work, group.drains = True, (), True

    # -- the lighthouse and its journal

    def can_stop_lighthouse(self, w: World, n: int) -> bool:
        return w.lighthouses[n].term > 0

    def stop_lighthouse(self, w: World, n: int) -> None:
        """It is killed, or deposed. A write may be under way; answers that it sent may still arrive."""
        lighthouse = w.lighthouses[n]
        if lighthouse.unwritten != NOTHING:
            w.under_way = (lighthouse.unwritten, lighthouse.term)
        w.lighthouses[n] = Lighthouse.thaw(new_lighthouse(len(w.groups)))
        for group in w.groups:
            if group.link == n:
                group.link = NOTHING

    def can_roll_back(self, w: World) -> bool:
        return bool(w.journal) and not any(lighthouse.term for lighthouse in w.lighthouses)

    def roll_back(self, w: World) -> None:
        """The journal loses its newest record; with its only one, everything."""
        w.change(w.journal[-1], has_lost_record=len(w.journal) > 1)
        w.journal = w.journal[:-1]

    def can_arrive(self, w: World) -> bool:
        return bool(w.under_way)

    def arrive(self, w: World) -> None:
        """A deposed leader's write reaches the store, which refuses it if another one has claimed the records."""
        quorum, term = w.under_way
        w.under_way = ()
        if term == w.term or "unguarded_writes" in self.weak:
            w.journal = (*w.journal, quorum)

    def can_start(self, w: World, n: int) -> bool:
        if w.lighthouses[n].term:
            return False
        return "leads_on" in self.weak or not any(lighthouse.term for lighthouse in w.lighthouses)

    def start(self, w: World, n: int) -> None:
        """It claims the records, and waits for the members of the quorum that it finds there."""
        w.term += 1
        lighthouse = w.lighthouses[n]
        lighthouse.term = w.term
        if not w.journal:
            lighthouse.unknown = [bool(w.quorums)] * len(w.groups)
            return
        lighthouse.quorum, lighthouse.phase = w.journal[-1], RETURNING
        for g, _ in w.quorums[lighthouse.quorum].members:
            lighthouse.lease[g] = "forgets_leases" not in self.weak

    def can_write(self, w: World, n: int) -> bool:
        return w.lighthouses[n].unwritten != NOTHING

    def write(self, w: World, n: int) -> None:
        lighthouse = w.lighthouses[n]
        if lighthouse.term == w.term or "unguarded_writes" in self.weak:
            w.journal = (*w.journal, lighthouse.unwritten)
        lighthouse.unwritten = NOTHING

    # -- sessions

    def can_connect(self, w: World, g: int, n: int) -> bool:
        group = w.groups[g]
        return group.link == NOTHING and not group.has_left and w.serves(n)

    def connect(self, w: World, g: int, n: int) -> None:
        self.open_session(w, g, n)
        self._exchange(w, g)
        if w.groups[g].asks and "joins_once" not in self.weak:
            self.deliver(w, n, g, w.groups[g].join())
            self.review(w, w.lighthouses[n])

    def open_session(self, w: World, g: int, n: int) -> None:
        group, lighthouse = w.groups[g], w.lighthouses[n]
        if lighthouse.session[g] not in (NOTHING, group.incarnation):
            self._lose(w, n, g)
        lighthouse.session[g], lighthouse.joins[g], lighthouse.untold[g] = group.incarnation, None, False
        group.link, group.mail = n, NOTHING

    def can_beat(self, w: World, g: int) -> bool:
        group = w.groups[g]
        return w.serves(group.link) and w.lighthouses[group.link].session[g] == group.incarnation

    def beat(self, w: World, g: int) -> None:
        self._exchange(w, g)

    def _exchange(self, w: World, g: int) -> None:
        """The group reports, the lighthouse answers with its order, and both count a lease from then on."""
        group = w.groups[g]
        lighthouse = w.lighthouses[group.link]
        self.hear(w, g, Report(group.quorum, group.mode, group.granted))
        self.review(w, lighthouse)
        self.obey(w, g, self.order(w, lighthouse, g, group.quorum), lighthouse.upto)
        group.has_lease = True

    def hear(self, w: World, g: int, report: Report) -> None:
        """The lighthouse reads what a manager holds."""
        group = w.groups[g]
        lighthouse = w.lighthouses[group.link]
        seen = max(group.seen, w.quorums[report.quorum].quorum_id if report.quorum != NOTHING else 0)
        self._learn(w, lighthouse, seen)
        self._observe(w, lighthouse, g, report)
        lighthouse.unknown[g] = False
        if w.is_member(lighthouse.quorum, g) and lighthouse.phase != REVOKED:
            lighthouse.lease[g] = True

    def order(self, w: World, lighthouse: Lighthouse, g: int, quorum: int) -> str:
        """Return the lighthouse's order about the quorum that a group holds."""
        is_present = w.is_member(lighthouse.quorum, g) and lighthouse.quorum == quorum
        return lighthouse.phase if is_present else REVOKED

    def _learn(self, w: World, lighthouse: Lighthouse, seen: int) -> None:
        """An id that the lighthouse does not know shows that its journal is outdated."""
        last_id = w.quorums[lighthouse.quorum].quorum_id if lighthouse.quorum != NOTHING else 0
        if seen > max(last_id, lighthouse.seen) and "trusts_journal" not in self.weak:
            self._revoke(lighthouse)
            for g, session in enumerate(lighthouse.session):
                lighthouse.unknown[g] |= session == NOTHING
        lighthouse.seen = max(lighthouse.seen, seen)

    def can_lose(self, w: World, n: int, g: int) -> bool:
        lighthouse, group = w.lighthouses[n], w.groups[g]
        session = lighthouse.session[g]
        if "dead_counts_as_alive" in self.weak or session == NOTHING or not lighthouse.term:
            return False
        return group.link != n or session != group.incarnation

    def lose(self, w: World, n: int, g: int) -> None:
        """The lighthouse notices that a group is gone or cut off."""
        self._lose(w, n, g)

    def _lose(self, w: World, n: int, g: int) -> None:
        lighthouse = w.lighthouses[n]
        session = lighthouse.session[g]
        lighthouse.session[g], lighthouse.joins[g], lighthouse.untold[g] = NOTHING, None, False
        if "keeps_the_lost" in self.weak and w.incarnation_in(lighthouse.quorum, g) is not None:
            quorum = w.quorums[lighthouse.quorum]
            lighthouse.joins[g] = dict(zip((m for m, _ in quorum.members), quorum.joins, strict=True))[g]
        if w.incarnation_in(lighthouse.quorum, g) == session and (lighthouse.phase != RETURNING or lighthouse.back[g]):
            self._revoke(lighthouse)

    def can_lease_ends(self, w: World, n: int, g: int) -> bool:
        """The assumption about clocks: the manager's lease ends first."""
        lighthouse, group = w.lighthouses[n], w.groups[g]
        if lighthouse.phase in (STANDS, RECALLED) or not (lighthouse.lease[g] or lighthouse.unknown[g]):
            return False
        if not group.has_lease or "ends_leases_early" in self.weak:
            return True
        return not lighthouse.unknown[g] and w.incarnation_in(lighthouse.quorum, g) != group.incarnation

    def lease_ends(self, w: World, n: int, g: int) -> None:
        lighthouse = w.lighthouses[n]
        lighthouse.lease[g] = lighthouse.unknown[g] = False
        w.is_late = True

    def can_expire(self, w: World, g: int) -> bool:
        return w.groups[g].has_lease and not w.serves(w.groups[g].link)

    def expire(self, w: World, g: int) -> None:
        w.groups[g].has_lease = False
        w.is_late = True

    def can_miss_beat(self, w: World, g: int) -> bool:
        return w.groups[g].has_lease and w.serves(w.groups[g].link)

    def miss_beat(self, w: World, g: int) -> None:
        """The lease ends although the connection lives: the answers come too late."""
        self.expire(w, g)

    def can_stop_returning(self, w: World, n: int) -> bool:
        lighthouse = w.lighthouses[n]
        if lighthouse.phase != RETURNING:
            return False
        return any(not lighthouse.back[g] and not lighthouse.lease[g] for g, _ in w.quorums[lighthouse.quorum].members)

    def stop_returning(self, w: World, n: int) -> None:
        """A member has not come back within the lease."""
        self._revoke(w.lighthouses[n])

    # -- the standing quorum, at the lighthouse

    def _members(self, w: World, lighthouse: Lighthouse) -> list[int]:
        return [g for g, _ in w.quorums[lighthouse.quorum].members]

    def _observe(self, w: World, lighthouse: Lighthouse, g: int, report: Report) -> None:
        if not w.is_member(lighthouse.quorum, g):
            return
        lighthouse.heard[g] = True
        if lighthouse.phase in (NO_QUORUM, REVOKED) or report.quorum != lighthouse.quorum:
            return
        if report.mode == REVOKED:
            if "no_revoke_after_a_discard" not in self.weak:
                self._revoke(lighthouse)
        elif lighthouse.phase == RETURNING:
            self._confirm(w, lighthouse, g, needs_recall=report.mode != STANDS)
        elif report.mode != STANDS:
            self._recall(lighthouse)
            if report.mode == JOINING or (lighthouse.phase == RECALLED and report.mode == RECALLED):
                self._note_grant(w, lighthouse, g, report.granted, is_spent=report.mode == JOINING)

    def _confirm(self, w: World, lighthouse: Lighthouse, g: int, *, needs_recall: bool) -> None:
        lighthouse.back[g] = True
        lighthouse.needs_recall |= needs_recall
        members = self._members(w, lighthouse)
        if all(lighthouse.back[m] for m in members) or "stands_before_all_are_back" in self.weak:
            self._check(
                "S9", holds=all(lighthouse.back[m] for m in members), text="a quorum stands before all are back"
            )
            lighthouse.phase = STANDS
            if lighthouse.needs_recall:
                self._recall(lighthouse)
                self._settle(w, lighthouse)

    def _recall(self, lighthouse: Lighthouse) -> None:
        if lighthouse.phase == STANDS:
            lighthouse.phase = RECALLED

    def _revoke(self, lighthouse: Lighthouse) -> None:
        if lighthouse.phase != NO_QUORUM:
            lighthouse.phase = REVOKED

    def _note_grant(self, w: World, lighthouse: Lighthouse, g: int, granted: int, *, is_spent: bool) -> None:
        lighthouse.granted[g] = granted
        lighthouse.spent[g] |= is_spent
        self._settle(w, lighthouse)

    def _settle(self, w: World, lighthouse: Lighthouse) -> None:
        """Once all have reported their grants, resume up to the highest step."""
        granted = [lighthouse.granted[m] for m in self._members(w, lighthouse)]
        if lighthouse.phase != RECALLED or (NOTHING in granted and "resumes_at_once" not in self.weak):
            return
        lighthouse.upto = min(granted) if "resumes_too_low" in self.weak else max(granted)
        self._check("S6", holds=max(granted) - min(granted) <= 1, text=f"members have granted {granted}")
        behind = [m for m in self._members(w, lighthouse) if lighthouse.spent[m]]
        if any(lighthouse.granted[m] < lighthouse.upto for m in behind):
            self._revoke(lighthouse)
        elif "never_resumes" not in self.weak:
            lighthouse.phase = RESUMED

    def review(self, w: World, lighthouse: Lighthouse) -> None:
        """Recall the quorum for a newcomer, or if a member drains."""
        if lighthouse.phase != STANDS or lighthouse.unwritten != NOTHING:
            return
        members = w.quorums[lighthouse.quorum].members
        waits = any(
            join is not None and (g, join.incarnation) not in members for g, join in enumerate(lighthouse.joins)
        )
        drains = any(w.groups[g].drains and lighthouse.session[g] == i for g, i in w.quorums[lighthouse.quorum].members)
        if (waits and "ignores_newcomers" not in self.weak) or drains:
            self._recall(lighthouse)

    # -- joins

    def may_ask(self, group: Group) -> bool:
        if group.work or group.asks:
            return False
        if group.mode in (NO_QUORUM, REVOKED, JOINING):
            return True
        return group.mode == RESUMED and group.granted >= group.upto and group.step == group.granted + 1

    def can_ask(self, w: World, g: int) -> bool:
        group = w.groups[g]
        return not group.drains and self.can_beat(w, g) and self.may_ask(group)

    def ask(self, w: World, g: int) -> None:
        group = w.groups[g]
        group.asks = True
        if group.mode == RESUMED:
            group.mode = JOINING
        self.deliver(w, group.link, g, group.join())
        self.review(w, w.lighthouses[group.link])

    def deliver(self, w: World, n: int, g: int, join: Join) -> None:
        """The lighthouse receives a join."""
        lighthouse = w.lighthouses[n]
        lighthouse.unknown[g] = False
        lighthouse.joins[g] = join
        incarnation = w.incarnation_in(lighthouse.quorum, g)
        if incarnation == join.incarnation:
            self._joined(w, lighthouse, g, join)
        elif incarnation is not None and lighthouse.phase != RETURNING:
            self._revoke(lighthouse)

    def _joined(self, w: World, lighthouse: Lighthouse, g: int, join: Join) -> None:
        """A member of the last quorum asks for the next."""
        quorum = w.quorums[lighthouse.quorum]
        lighthouse.heard[g] = True
        if lighthouse.phase in (NO_QUORUM, REVOKED):
            return
        first = dict(zip((m for m, _ in quorum.members), quorum.joins, strict=True))[g]
        if join.seen != quorum.quorum_id:
            if first != join:
                self._revoke(lighthouse)
                return
            lighthouse.joins[g], lighthouse.untold[g] = None, True
            if lighthouse.phase == RETURNING:
                self._confirm(w, lighthouse, g, needs_recall=False)
            return
        done = max(join.step - 1, quorum.start) if is_late(quorum, first) else join.step - 1
        if join.has_failed or join.is_torn or (lighthouse.phase == RESUMED and done < lighthouse.upto):
            if "no_revoke_after_a_discard" not in self.weak:
                self._revoke(lighthouse)
        elif lighthouse.phase == RETURNING:
            lighthouse.granted[g], lighthouse.spent[g] = done, True
            self._confirm(w, lighthouse, g, needs_recall=True)
        else:
            self._recall(lighthouse)
            self._note_grant(w, lighthouse, g, done, is_spent=True)

    # -- forming

    def can_form(self, w: World, n: int) -> bool:
        lighthouse = w.lighthouses[n]
        if not self._may_form(w, lighthouse):
            return False
        members = self._members(w, lighthouse) if lighthouse.quorum != NOTHING else []
        is_whole = bool(members) and self._joined_members(w, lighthouse) == members
        return is_whole or not self._stragglers(lighthouse)

    def can_form_without_stragglers(self, w: World, n: int) -> bool:
        lighthouse = w.lighthouses[n]
        return bool(self._stragglers(lighthouse)) and self._may_form(w, lighthouse) and not self.can_form(w, n)

    def form_without_stragglers(self, w: World, n: int) -> None:
        """A group that is alive misses the join timeout."""
        w.is_late = True
        self.form(w, n)

    def _stragglers(self, lighthouse: Lighthouse) -> list[int]:
        return [g for g, i in enumerate(lighthouse.session) if i != NOTHING and lighthouse.joins[g] is None]

    def _may_form(self, w: World, lighthouse: Lighthouse) -> bool:
        if not lighthouse.term or lighthouse.phase in (STANDS, RECALLED, RETURNING) or lighthouse.unwritten != NOTHING:
            return False
        if any(lighthouse.untold):  # answers are sent before anything else
            return False
        chosen = [g for g, join in enumerate(lighthouse.joins) if join is not None]
        is_whole = any(join is not None and not join.is_torn for join in lighthouse.joins)
        if not chosen or not is_whole or len(w.quorums) >= self.most_quorums:
            return False
        if any(lighthouse.unknown) and "forms_over_unknown" not in self.weak:
            return False
        if lighthouse.quorum == NOTHING:
            return True
        members = self._members(w, lighthouse)
        if "common_by_name" in self.weak:
            has_common = bool(set(members) & set(chosen))
        else:
            has_common = bool(self._joined_members(w, lighthouse))
        if not has_common:
            return not any(lighthouse.lease[g] for g in members) or "forms_before_lease_end" in self.weak
        is_known = all(lighthouse.heard[g] or not lighthouse.lease[g] for g in members)
        return is_known or "forms_while_one_is_away" in self.weak

    def _joined_members(self, w: World, lighthouse: Lighthouse) -> list[int]:
        members = w.quorums[lighthouse.quorum].members
        return [g for g, i in members if (join := lighthouse.joins[g]) is not None and join.incarnation == i]

    def form(self, w: World, n: int) -> None:
        lighthouse = w.lighthouses[n]
        chosen = [(g, join) for g, join in enumerate(lighthouse.joins) if join is not None]
        last = w.quorums[lighthouse.quorum] if lighthouse.quorum != NOTHING else None
        self._check_unknown(w, lighthouse, chosen)
        last_id = last.quorum_id if last is not None else 0
        history = last.history if last is not None else frozenset[int]()
        history |= {join.seen for _, join in chosen if join.seen > last_id} - {0}
        sources = self._sources(w, lighthouse.term, chosen, last, history)
        start = max(join.step for join in sources)
        tags = Counter(join.tag for join in sources if join.step == start)
        tag = max(tags, key=lambda each: (tags[each], each))
        clock = 0 if "no_clock" in self.weak else max((q.quorum_id for q in w.quorums), default=0)
        seen = 0 if "ignores_seen_ids" in self.weak else max(lighthouse.seen, *(join.seen for _, join in chosen))
        quorum_id = 1 + max(clock, last_id, seen)
        if "same_id_again" in self.weak and last is not None:
            quorum_id = last_id
        members = tuple((g, join.incarnation) for g, join in chosen)
        joins = tuple(join for _, join in chosen)
        branch_id = 0 if last is None else quorum_id if start < last.start else last.branch_id
        quorum = Quorum(quorum_id, members, start, tag, joins, history | {tag, quorum_id}, lighthouse.term, branch_id)
        quorum = quorum._replace(parts=((),) * len(members))
        self._check_kept(w, quorum)
        self._check_same_id(w, lighthouse)
        lighthouse.quorum, lighthouse.phase, lighthouse.needs_recall = len(w.quorums), STANDS, False
        w.quorums = (*w.quorums, quorum)
        for g in range(len(w.groups)):
            is_in = any(m == g for m, _ in members)
            lighthouse.lease[g] = lighthouse.untold[g] = lighthouse.heard[g] = lighthouse.back[g] = is_in
            lighthouse.granted[g], lighthouse.spent[g] = NOTHING, False
            lighthouse.joins[g] = None if is_in else lighthouse.joins[g]
        lighthouse.unwritten = lighthouse.quorum
        if not self.delays_writes:
            self.write(w, n)
        self.review(w, lighthouse)

    def _sources(
        self, w: World, term: int, chosen: list[tuple[int, Join]], last: Quorum | None, history: frozenset[int]
    ) -> list[Join]:
        """Return the joins whose states may count: a running job's history wins (protocol.md, "Which state counts")."""
        named = [(g, join) for g, join in chosen if join.tag in history and not join.is_torn]
        members = [j for g, j in named if last is not None and self._has_healed(g, j, last) and j.step]
        if members and last is not None and "highest_step_wins" not in self.weak:
            furthest = max(join.step for join in members)
            ours = [j for g, j in named if j.step <= self._limit(w, term, g, j, furthest, last)]
        else:
            ours = [join for _, join in chosen]
        return [j for j in ours if j.step and not j.is_torn] or [j for j in ours if not j.is_torn] or ours

    def _has_healed(self, g: int, join: Join, last: Quorum) -> bool:
        """Return whether the group is a member that holds what the quorum started from, or what came of it."""
        for (member, i), before in zip(last.members, last.joins, strict=True):
            if (member, i) == (g, join.incarnation):
                was_behind = (before.step, before.tag) != (last.start, last.tag)
                return not was_behind or (join.step, join.tag) != (before.step, before.tag)
        return False

    def _limit(self, w: World, term: int, g: int, join: Join, furthest: int, last: Quorum) -> int:
        """Return the highest step of this group that counts.

        A group may be one step ahead if its state is that from which its last quorum, or the job's, started, or what
        that quorum committed. The job's counts by name, since a manager may be new, and its ranks may not. There is no
        limit for states of quorums before a branch, or of quorums that the lighthouse does not know.
        """
        is_before_branch = join.tag < last.branch_id and "a_branch_wins" not in self.weak
        if is_before_branch or join.seen > last.quorum_id:
            return join.step
        own = [q for q in w.quorums if (g, join.incarnation) in q.members and q.term == term][-1:]
        if "new_manager_is_a_stranger" not in self.weak:
            own += [last] if g in dict(last.members) else []
        took_part = any(join.tag in (quorum.quorum_id, quorum.tag) for quorum in own)
        return max(furthest, last.start) + 1 if took_part else furthest

    def _check_unknown(self, w: World, lighthouse: Lighthouse, chosen: list[tuple[int, Join]]) -> None:
        """After a restart, a member that has not reported may hold a lease of a later quorum."""
        last = lighthouse.quorum
        away = [g for g, _ in w.quorums[last].members if not lighthouse.heard[g]] if last != NOTHING else []
        holds = [g for g in away if w.is_member(last, g) and w.groups[g].has_lease and w.groups[g].mode == STANDS]
        self._check("S3", holds=not holds, text=f"a quorum forms, and {holds}, not heard of, may hold a lease")

    def _check_kept(self, w: World, quorum: Quorum) -> None:
        """A committed step stays while a group that holds it was in every quorum since, and none of those committed.

        It also stays if each quorum since has begun below the one that committed it.
        """
        for (g, _), join in zip(quorum.members, quorum.joins, strict=True):
            place = next((k for k, q in enumerate(w.quorums) if q.quorum_id == join.tag), None)
            if place is None or join.is_torn or w.quorums[place].committed < join.step - 1:
                continue
            later = [q for q in w.quorums[place + 1 :] if q.is_told]
            is_kept = all(g in dict(q.members) and q.committed == NOTHING for q in later)
            if is_kept or all(q.start < w.quorums[place].start for q in later):
                held = f"group {NAMES[g]} holds step {join.step} of quorum {join.tag}"
                text = f"{held}, and the next one starts at {quorum.start}"
                self._check("S14", holds=quorum.start >= join.step, text=text)

    def _check_same_id(self, w: World, lighthouse: Lighthouse) -> None:
        """If only the lighthouse stops, and no lease ends, a quorum changes only for a newcomer or a leaver."""
        spent = self._spent(w)
        if lighthouse.quorum == NOTHING or w.is_late or sum(spent) != spent[STOP]:
            return
        changes = any(g.drains for g in w.groups) or len(self._members(w, lighthouse)) < len(w.groups)
        self._check("S9", holds=changes, text="a restart of the lighthouse changed the quorum's id")

    def can_tell(self, w: World, n: int, g: int) -> bool:
        lighthouse, group = w.lighthouses[n], w.groups[g]
        if not lighthouse.untold[g] or group.link != n or not group.asks or not w.is_member(lighthouse.quorum, g):
            return False
        return lighthouse.unwritten == NOTHING or "tells_before_writing" in self.weak

    def tell(self, w: World, n: int, g: int) -> None:
        lighthouse = w.lighthouses[n]
        quorum = w.quorums[lighthouse.quorum]
        is_recorded = lighthouse.quorum in w.journal[-1:] and lighthouse.term == w.term
        self._check("S1", holds=is_recorded, text=f"quorum {quorum.quorum_id} is sent, and the store has another one")
        same = [q for k, q in enumerate(w.quorums) if k != lighthouse.quorum and q.quorum_id == quorum.quorum_id]
        text = f"id {quorum.quorum_id} names {[q.members for q in same]} and {quorum.members}"
        self._check("S1", holds=not any(q.is_told for q in same), text=text)
        w.change(lighthouse.quorum, is_told=True)
        w.groups[g].mail, lighthouse.untold[g] = lighthouse.quorum, False

    # -- the manager

    def can_take(self, w: World, g: int) -> bool:
        group = w.groups[g]
        return group.asks and group.mail != NOTHING and (group.has_lease or "grants_after_lease" in self.weak)

    def take(self, w: World, g: int) -> None:
        """The ranks begin the first step of a quorum."""
        group = w.groups[g]
        quorum = w.quorums[group.mail]
        self._check(
            "S2", holds=quorum.quorum_id > group.seen, text=f"group {NAMES[g]} goes back to quorum {quorum.quorum_id}"
        )
        group.quorum, group.mail, group.asks, group.seen = group.mail, NOTHING, False, quorum.quorum_id
        group.mode, group.granted, group.upto, group.has_failed = STANDS, quorum.start, 0, False
        if has_late(quorum):  # all members join after its first step
            group.mode, group.upto = RESUMED, quorum.start
        is_source = (group.step, group.tag) == (quorum.start, quorum.tag) and not group.is_torn
        is_fresh = not quorum.start and not group.step and not group.is_torn  # at step 0 all states count as equal
        is_ready = is_source or is_fresh or "contributes_before_healing" in self.weak
        progress = COMPUTES if is_ready else LATE if group.begins else HEALS
        group.work = (group.quorum, quorum.start, progress)

    def obey(self, w: World, g: int, phase: str, upto: int) -> None:
        """The manager reads an order about the quorum that it holds."""
        group = w.groups[g]
        if group.mode not in (STANDS, RECALLED, RESUMED):
            return
        if phase == REVOKED and "ignores_revokes" not in self.weak:
            group.mode = REVOKED
            if group.work and group.work[2] != HAS_SUM:
                self._give_up_step(w, g)
        elif phase == RECALLED and group.mode == STANDS and "ignores_recalls" not in self.weak:
            group.mode = RECALLED
        elif phase == RESUMED:
            group.mode, group.upto = RESUMED, upto

    def can_grant(self, w: World, g: int) -> bool:
        group = w.groups[g]
        may = group.mode == STANDS or (group.mode == RESUMED and group.granted < group.upto)
        if not may or group.granted + 1 >= self.last_step:
            return False
        if group.work and "grants_before_commit" not in self.weak:
            return False
        has_committed = group.step == group.granted + 1 and group.tag == w.quorums[group.quorum].quorum_id
        has_lease = group.has_lease or "grants_after_lease" in self.weak
        return (has_committed or "grants_before_commit" in self.weak) and has_lease and not group.has_failed

    def grant(self, w: World, g: int) -> None:
        group = w.groups[g]
        self._check_alone(w, g)
        text = f"group {NAMES[g]} grants step {group.granted + 1} before step {group.granted} was committed"
        self._check("S4", holds=group.step == group.granted + 1, text=text)
        group.granted += 1
        group.work = (group.quorum, group.granted, COMPUTES)

    def _check_alone(self, w: World, g: int) -> None:
        """No step is granted while a later quorum without a common member is active. After a roll-back it may be."""
        held = w.quorums[w.groups[g].quorum]
        for later in w.quorums[w.groups[g].quorum + 1 :]:
            if not later.is_told or held.has_lost_record:
                continue
            has_common = bool(set(held.members) & set(later.members))
            text = f"group {NAMES[g]} grants a step of quorum {held.quorum_id} while quorum {later.quorum_id} is active"
            self._check("S3", holds=has_common, text=text)
            if has_common:
                return

    # -- the step

    def can_heal(self, w: World, g: int) -> bool:
        work = w.groups[g].work
        return bool(work) and work[2] == HEALS and self._source(w, g, work[0]) is not None

    def _source(self, w: World, g: int, k: int) -> Group | None:
        quorum = w.quorums[k]
        for other, incarnation in quorum.members:
            source = w.groups[other]
            is_whole = (source.step, source.tag) == (quorum.start, quorum.tag) and not source.is_torn
            if other != g and source.incarnation == incarnation and source.quorum == k and is_whole:
                return source
        return None

    def heal(self, w: World, g: int) -> None:
        group = w.groups[g]
        assert group.work
        k, step, _ = group.work
        source = self._source(w, g, k)
        assert source is not None
        group.step, group.tag, group.content, group.is_torn = source.step, source.tag, source.content, False
        group.work = (k, step, COMPUTES)

    def _leave_part(self, w: World, g: int) -> None:
        """A group that gives up a step or dies may have sent its part of the all-reduce."""
        group = w.groups[g]
        if group.work and group.work[2] in (COMPUTES, LATE):
            k, step, progress = group.work
            part = (step, (group.step, group.tag, group.content) if progress == COMPUTES else ())
            quorum = w.quorums[k]
            parts = [part if m == g else p for (m, _), p in zip(quorum.members, quorum.parts, strict=True)]
            w.change(k, parts=tuple(parts))

    def can_reduce(self, w: World, k: int) -> bool:
        """All members have sent their parts, or may have. One at least waits for the sum."""
        works = [work for g, _ in w.quorums[k].members if (work := w.groups[g].work) and work[0] == k]
        if not works or any(work[2] not in (COMPUTES, LATE) for work in works):
            return False
        parts = [part for part in w.quorums[k].parts if part]
        if "reduces_without_one" not in self.weak and len(works) + len(parts) < len(w.quorums[k].members):
            return False
        return len({work[1] for work in works} | {part[0] for part in parts}) == 1

    def reduce(self, w: World, k: int) -> None:
        """An all-reduce of all members completes."""
        quorum = w.quorums[k]
        members = [g for g, _ in quorum.members if w.groups[g].work and w.groups[g].work[0] == k]
        work = w.groups[members[0]].work
        assert work
        adding = [w.groups[g] for g in members if (at := w.groups[g].work) and at[2] == COMPUTES]
        states = {(group.step, group.tag, group.content) for group in adding}
        sent = [part for part in quorum.parts if part]
        states |= {state for _, state in sent if state}
        where = f"step {work[1]} of quorum {quorum.quorum_id}"
        self._check("S3", holds=len(states) == 1, text=f"{where} adds gradients of {len(states)} states")
        self._check("S3", holds=quorum.reduced < work[1], text=f"{where} is tried twice")
        self._check("S10", holds=not any(group.is_torn for group in adding), text=f"{where}: a torn state takes part")
        if len(members) + len(sent) == len(quorum.members):
            w.change(k, reduced=work[1])
        for g in members:
            self._end_sum(w, g, k, work[1])

    def _end_sum(self, w: World, g: int, k: int, step: int) -> None:
        """A group that learned too late that it must heal votes no. That is no failure."""
        group = w.groups[g]
        if group.work and group.work[2] == LATE:
            group.work, group.begins = (), False
            if group.mode in (STANDS, RECALLED, RESUMED):
                group.mode = JOINING
        else:
            group.work = (k, step, HAS_SUM)

    def can_commit(self, w: World, g: int) -> bool:
        work = w.groups[g].work
        return bool(work) and (work[2] == HAS_SUM or ("commits_without_sum" in self.weak and work[2] == COMPUTES))

    def commit(self, w: World, g: int) -> None:
        group = w.groups[g]
        assert group.work
        k, step, _ = group.work
        content = self._contents.setdefault((group.content, k, step), len(self._contents) + 1)
        self._commit(w, g, content)

    def _commit(self, w: World, g: int, content: int) -> None:
        group = w.groups[g]
        assert group.work
        k, step, _ = group.work
        quorum = w.quorums[k]
        text = f"group {NAMES[g]} commits step {step} of quorum {quorum.quorum_id}, and not all took part"
        self._check("S4", holds=quorum.reduced >= step, text=text)
        group.step, group.tag, group.content = step + 1, quorum.quorum_id, content
        group.work, group.has_failed, group.begins = (), False, True
        w.change(k, committed=max(w.quorums[k].committed, step))
        for other in w.groups:
            if (other.step, other.tag) == (group.step, group.tag) and not other.is_torn and not group.is_torn:
                text = f"tag ({group.step}, {group.tag}) names two states"
                self._check("S3", holds=other.content == group.content, text=text)

    def can_commit_unapplied(self, w: World, g: int) -> bool:
        work = w.groups[g].work
        return bool(work) and work[2] == HAS_SUM

    def commit_unapplied(self, w: World, g: int) -> None:
        """The step was committed, and the optimizer did not apply it: the rank holds no state."""
        group = w.groups[g]
        group.is_torn = "unapplied_unnoticed" not in self.weak
        self._commit(w, g, group.content)
        if group.is_torn:
            group.tag, group.mode, group.content = 0, REVOKED if group.mode != NO_QUORUM else NO_QUORUM, 0
            if "torn_contributes" in self.weak:
                group.tag, group.mode = w.quorums[group.quorum].quorum_id, STANDS

    def can_discard(self, w: World, g: int) -> bool:
        """A peer's connections are gone, so the all-reduce cannot complete."""
        work = w.groups[g].work
        if not work or work[2] == HAS_SUM:
            return False
        return any(self._is_gone(w, work[0], other, i) for other, i in w.quorums[work[0]].members if other != g)

    def _is_gone(self, w: World, k: int, g: int, incarnation: int) -> bool:
        peer = w.groups[g]
        if peer.incarnation != incarnation:
            return True
        has_ended = peer.quorum != k or peer.mode in (REVOKED, JOINING)
        return peer.seen >= w.quorums[k].quorum_id and has_ended and not (peer.work and peer.work[0] == k)

    def discard(self, w: World, g: int) -> None:
        self._give_up_step(w, g)
        w.groups[g].mode = REVOKED if w.groups[g].mode != NO_QUORUM else NO_QUORUM

    def _give_up_step(self, w: World, g: int) -> None:
        self._leave_part(w, g)
        group = w.groups[g]
        group.work, group.has_failed, group.begins = (), True, False
        group.discards += 1
        spent = self._spent(w)
        faults = sum(spent)
        text = f"group {NAMES[g]} discards a step, and no fault has happened"
        self._check("S6", holds=faults > 0 or w.is_late, text=text)
        if faults == spent[STOP] and not w.is_late:
            self._check(
                "S9", holds=not faults, text=f"group {NAMES[g]} discards a step for a restart of the lighthouse"
            )
        text = f"group {NAMES[g]} has discarded {group.discards} steps after {faults} faults"
        self._check("S7", holds=group.discards <= faults, text=text)

    # -- the end of a group without a state

    def can_give_up(self, w: World, g: int) -> bool:
        group = w.groups[g]
        is_alone = all(o.is_torn or o.has_left for o in w.groups) or "gives_up_beside_a_peer" in self.weak
        return group.is_torn and group.asks and is_alone

    def give_up(self, w: World, g: int) -> None:
        """No group holds a state: this one exits, and is started again."""
        others = [o for h, o in enumerate(w.groups) if h != g and not o.is_torn and not o.has_left]
        self._check("S11", holds=not others, text=f"group {NAMES[g]} exits, and {len(others)} groups hold a state")
        self.kill_group(w, g)
