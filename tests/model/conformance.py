"""Checks that each step of a simulated run is an action that the model allows.

The simulator tells what its processes send (`World.on_send`). Each message is the outcome of an action of the model:
an answer to a join of `form` and `tell`, a rank's first step of `take`, a decision of `commit` or `discard`, and so on.
The model follows with its own actions, so a guard that forbids one refuses the trace. What a run does not show, such as
the arrival of a message or the end of a lease, is found by search: the shortest sequence of such actions after which
the lighthouse may send what it sent. Only the environment is taken on trust: which processes die, and which
connections break.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Assignment, Participant
from lighthouse_protocol.refusals import Superseded, Unreachable
from tests.model.protocol import FAULTS, Model
from tests.model.state import (
    HAS_SUM,
    HEALS,
    JOINING,
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
    Report,
    World,
)

Sent = tuple[str, str, Any]
"""From whom, to whom, and the message."""

PHASES = {"standing": STANDS, "recalled": RECALLED, "resumed": RESUMED, "revoked": REVOKED, "returning": RETURNING}
MODES = {"standing": STANDS, "recalled": RECALLED, "resumed": RESUMED, "revoked": REVOKED, "joining": JOINING}
MOST_HIDDEN = 2
"""Actions in a row that a trace does not show."""


class NotAllowed(Exception):  # noqa: N818  the name that a reader looks for
    """The model does not allow what a trace shows."""


@dataclass
class Follower:
    """What is under way between a group and the lighthouse. `arriving` is in the order in which it was sent."""

    life: str = ""
    incarnation: str = ""
    arriving: deque[tuple[str, Any, int]] = field(default_factory=deque[tuple[str, Any, int]])
    orders: list[tuple[int, str, int]] = field(default_factory=list[tuple[int, str, int]])
    before_heal: tuple[int, int, int, bool] | None = None
    is_refused: bool = False  # the deadline of its last join has passed, unless the join came on another session, too


class Conformance:
    """Follows one trace. `rules` counts the model's actions that it did."""

    def __init__(self, trace: Sequence[Sent]) -> None:
        self._trace = trace = until_end(trace)
        names = sorted({who.split(".")[0] for who, _, message in trace if isinstance(message, session.Hello)})
        self._places = {name: g for g, name in enumerate(names)}
        most = dict.fromkeys(FAULTS, 10**9)
        self.model = Model(len(names), 10**9, most, quorums=10**9)
        self.world = World(self.model.first)
        self._groups = [Follower() for _ in names]
        self._ids: dict[int, int] = {}  # place of a quorum by its id in the trace
        self._answered = _answered_joins(trace)
        self._lighthouse = ""
        self._number = 0
        self._at: dict[str, tuple[int, int]] = {}  # the step that a rank is in
        self.actions: dict[str, int] = {}

    def run(self) -> None:
        for number, (who, to, message) in enumerate(self._trace):
            self._number = number
            if who.startswith("lighthouse") or to.startswith("lighthouse"):
                self._meet(who if who.startswith("lighthouse") else to)
            if to.startswith("lighthouse"):
                if to == self._lighthouse:
                    self._sends(self._places[who.split(".")[0]], message)
            elif who.startswith("lighthouse"):
                self._told(self._places[to.split(".")[0]], message)
            elif who.endswith(".manager"):
                self._answers(self._places[who.split(".")[0]], to, message)
            if self.model.broken:
                raise NotAllowed(f"message {self._number}: {self.model.broken}")

    # -- the model's actions

    def _do(self, name: str, *args: int) -> None:
        """Do an action that the trace shows."""
        if not self._try(name, *args):
            self._refuse(f"{name}{args} is not enabled")

    def _try(self, name: str, *args: int) -> bool:
        is_done = self.model.do(self.world, name, *args)
        self.actions[name] = self.actions.get(name, 0) + is_done
        return is_done

    def _refuse(self, text: str) -> None:
        raise self._refused(text)

    def _refused(self, text: str) -> NotAllowed:
        who, to, message = self._trace[self._number]
        return NotAllowed(f"message {self._number}, {who} to {to}: {text}; {message!r:.300}")

    def _expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self._refuse(f"{what} is {found!r}, and the model has {expected!r}")

    @property
    def _leader(self) -> Lighthouse:
        return self.world.lighthouses[0]

    def _meet(self, name: str) -> None:
        """Another process of the lighthouse speaks, or is spoken to."""
        if (len(name), name) > (len(self._lighthouse), self._lighthouse):
            self._lighthouse = name
            self._try("stop_lighthouse", 0)
            for follower in self._groups:
                follower.arriving.clear()
            self._do("start", 0)

    # -- messages of a manager to the lighthouse: they arrive later

    def _sends(self, g: int, message: Any) -> None:
        follower = self._groups[g]
        match message:
            case session.Hello(participant, levels):
                if participant.incarnation.rpartition(".")[0] != follower.life:
                    follower.life = participant.incarnation.rpartition(".")[0]
                    self._begin(g, participant.incarnation)
                self._post(g, "hello", self._report(g, levels))
            case session.Heartbeat(number, levels):
                self._post(g, "beat", (number, self._report(g, levels), levels.drains))
            case session.JoinRequest(_, participant):
                self._expect("the incarnation", participant.incarnation, follower.incarnation)
                self._post(g, "join", self._ask(g, participant))
            case session.WithdrawRequest():
                self._post(g, "withdraw", None)
            case session.Leave():
                self._post(g, "leave", None)
            case _:
                pass

    def _post(self, g: int, kind: str, content: Any) -> None:
        self._groups[g].arriving.append((kind, content, self._number))

    def _begin(self, g: int, incarnation: str) -> None:
        """A new manager. Its first join shows whether its ranks hold what they held before."""
        follower, group = self._groups[g], self.world.groups[g]
        follower.incarnation, follower.orders = incarnation, []
        first = self._first_join(g, incarnation)
        if first is not None and group.work and group.work[2] == HAS_SUM and first.step == group.work[1] + 1:
            self._do("commit", g)
        if first is not None and first.step and first.step == group.step:
            self._do("restart_manager", g)
        else:
            self._do("kill_group", g)

    def _first_join(self, g: int, incarnation: str) -> Any:
        for _, _, message in self._trace[self._number :]:
            if isinstance(message, session.JoinRequest) and message.participant.incarnation == incarnation:
                return message.participant
        return None

    def _report(self, g: int, levels: session.GroupReport) -> Report:
        """A manager says what it holds: the model's has to hold the same, after orders that it was sent."""
        group = self.world.groups[g]
        if levels.held is None:
            return Report(NOTHING, NO_QUORUM, 0)
        quorum, mode = self._ids[levels.held.quorum_id], MODES[levels.held.mode]
        self._expect("the quorum that it holds", quorum, group.quorum)
        if mode != group.mode:
            self._change_mode(g, group, mode)
        if mode in (STANDS, RECALLED, RESUMED):
            self._expect("its highest grant", levels.held.granted, group.granted)
        return Report(quorum, mode, levels.held.granted)

    def _change_mode(self, g: int, group: Group, mode: str) -> None:
        if mode in (RECALLED, RESUMED, REVOKED) and self._obey(g, mode):
            return
        if mode == RESUMED and group.mode == JOINING and not group.asks:
            return  # the sum of its only step has not arrived yet
        if mode == JOINING and not self.model.may_ask(group):
            self._obey(g, RESUMED)
        if mode == REVOKED:
            self._do("fail", g)
        elif mode == JOINING and self.model.may_ask(group):
            group.asks, group.mode = True, JOINING
        else:
            self._expect("the mode", mode, group.mode)

    def _obey(self, g: int, phase: str) -> bool:
        """Do what an order says, if the lighthouse has sent it."""
        group = self.world.groups[g]
        for quorum, sent, upto in reversed(self._groups[g].orders):
            if (quorum, sent) == (group.quorum, phase):
                self.model.obey(self.world, g, phase, upto)
                self.actions["obey"] = self.actions.get("obey", 0) + 1
                return True
        return False

    def _ask(self, g: int, participant: Participant) -> Join:
        follower, group = self._groups[g], self.world.groups[g]
        if participant.ranks_disagree and not group.is_torn:
            self._break_heal(g)
        if group.work:
            if group.work[2] == HAS_SUM and participant.step == group.work[1] + 1:
                self._do("commit", g)
            else:
                self._do("fail", g)
        if not group.asks:
            if not self.model.may_ask(group):
                for phase in (RESUMED, REVOKED):
                    if self._obey(g, phase) and self.model.may_ask(group):
                        break
            if not self.model.may_ask(group):
                self._refuse(f"it asks for a quorum, and is {group.mode} in step {group.granted}, has {group.step}")
            group.asks = True
            group.mode = JOINING if group.mode == RESUMED else group.mode
            self.actions["ask"] = self.actions.get("ask", 0) + 1
        group.begins = participant.heals_first is False
        tag = self._tag(participant, group)
        was_before = not participant.ranks_disagree and (participant.step, tag)
        if follower.before_heal is not None and was_before == follower.before_heal[:2]:
            group.step, group.tag, group.content, group.is_torn = follower.before_heal  # it has not healed in the end
        self._expect("whether its ranks hold different states", participant.ranks_disagree, group.is_torn)
        if not group.is_torn:
            self._expect("the step of its state", participant.step, group.step)
            self._expect("the tag of its state", self._tag(participant, group), group.tag)
        return group.join()

    def _break_heal(self, g: int) -> None:
        """Some of its ranks have not healed: what the model's group did since its heal has not happened."""
        follower, group = self._groups[g], self.world.groups[g]
        if follower.before_heal is None:
            self._refuse("its ranks hold different states, and it has not healed")
            return
        group.step, group.tag, group.content, group.is_torn = follower.before_heal
        if not group.is_torn:
            group.work = (group.quorum, self.world.quorums[group.quorum].start, HEALS)
            self._do("break_heal", g)

    def _tag(self, participant: Participant, group: Group) -> int:
        """Return the model's id of the quorum in the tag. A manager whose ranks send none has the model's."""
        if not participant.step or participant.tag_quorum_id is None:
            return group.tag if participant.tag_quorum_id is None else 0
        return self.world.quorums[self._ids[participant.tag_quorum_id]].quorum_id

    # -- messages of the lighthouse

    def _told(self, g: int, message: Any) -> None:
        follower = self._groups[g]
        match message:
            case session.Welcome(order=order):
                while any(kind == "hello" for kind, _, _ in follower.arriving):  # what was sent before it is lost
                    kind, content, _ = follower.arriving.popleft()
                    if kind == "hello":
                        self._arrive(g, kind, content)
                self._ordered(g, order)
            case session.HeartbeatAck(number, _, order):
                self._hear_up_to(g, number)
                self._ordered(g, order)
                self.world.groups[g].has_lease = True
            case session.JoinRejected(0, error) if not isinstance(error, Unreachable | Superseded):
                self._refuse_hello(g)
            case session.JoinRejected(number) if number:
                follower.is_refused = True
            case session.QuorumOrder():
                self._ordered(g, message)
            case session.JoinAccepted(_, quorum):
                if quorum.quorum_id not in self._ids:
                    self._form(quorum.quorum_id, sorted(self._places[p.replica_id] for p in quorum.participants))
                self._answer(g, quorum.quorum_id)
            case session.QuorumChanged(_, change):
                if change.quorum_id not in self._ids:
                    self._form(change.quorum_id, self._members_of(change.quorum_id))
                self._answer(g, change.quorum_id)
            case _:
                pass

    def _refuse_hello(self, g: int) -> None:
        """The session does not begin, and what was sent on it does not count. What was sent before has arrived."""
        arriving = self._groups[g].arriving
        if any(kind == "hello" for kind, _, _ in arriving):
            while arriving[0][0] != "hello":
                self._do_hidden("arrive", g)
            arriving.popleft()
            while arriving and arriving[0][0] != "hello":
                arriving.popleft()

    def _members_of(self, quorum_id: int) -> list[int]:
        """A short answer does not list the members. Another message may, or the first step of a rank."""
        for _, _, message in self._trace[self._number :]:
            if isinstance(message, session.JoinAccepted) and message.quorum.quorum_id == quorum_id:
                return sorted(self._places[p.replica_id] for p in message.quorum.participants)
            if isinstance(message, tuple) and message[0] == "on_quorum" and message[1].quorum_id == quorum_id:
                return sorted(self._places[name] for name in message[1].replica_ids)
        answered = {
            to
            for _, to, message in self._trace
            if isinstance(message, session.QuorumChanged) and message.change.quorum_id == quorum_id
        }
        return sorted(self._places[name.split(".")[0]] for name in answered)

    def _hear_up_to(self, g: int, number: int) -> None:
        arriving = self._groups[g].arriving
        if any(kind == "beat" and content[0] == number for kind, content, _ in arriving):
            while True:
                kind, content, _ = arriving.popleft()
                self._arrive(g, kind, content)
                if kind == "beat" and content[0] == number:
                    break

    def _arrive(self, g: int, kind: str, content: Any) -> None:
        world, group = self.world, self.world.groups[g]
        if kind == "hello":
            group.link = NOTHING
            mail = group.mail
            self.model.open_session(world, g, 0)
            group.mail = mail
            self.model.hear(world, g, content)
        elif kind == "join" and self._leader.session[g] == content.incarnation:  # its process may have died meanwhile
            self.model.deliver(world, 0, g, content)
            self._groups[g].is_refused = False
        elif group.link == NOTHING or self._leader.session[g] != group.incarnation:
            return  # of a session that is over
        elif kind == "beat":
            group.drains |= content[2]
            self.model.hear(world, g, content[1])
        elif kind == "withdraw":
            self._leader.joins[g] = None
        elif kind == "leave":
            self.model.do(world, "leave", g)
        self.actions[f"arrive: {kind}"] = self.actions.get(f"arrive: {kind}", 0) + 1

    def _ordered(self, g: int, order: session.QuorumOrder | None) -> None:
        """The lighthouse orders: that has to be its phase in the model, now or after what the trace does not show."""
        if order is None or order.quorum_id not in self._ids:
            return
        quorum, phase = self._ids[order.quorum_id], PHASES[order.phase]

        is_dead = self._leader.session[g] not in (NOTHING, self.world.groups[g].incarnation)

        def is_so() -> bool:
            if is_dead:  # the lighthouse has not noticed
                return quorum != self._leader.quorum or self._leader.phase == phase
            found = self.model.order(self.world, self._leader, g, quorum)
            return found == phase and (phase != RESUMED or self._leader.upto == order.upto)

        if not self._search(is_so, order.lost, may_lose=phase == REVOKED):
            found = self.model.order(self.world, self._leader, g, quorum)
            self._refuse(f"it orders {phase} up to {order.upto}; in the model {found} up to {self._leader.upto}")
        if not is_dead:
            self._groups[g].orders.append((quorum, phase, order.upto))

    def _form(self, quorum_id: int, members: list[int]) -> None:
        def may_form() -> bool:
            joined = [g for g, join in enumerate(self._leader.joins) if join is not None]
            if joined != members:
                return False
            return self.model.can_form(self.world, 0) or self.model.can_form_without_stragglers(self.world, 0)

        self._gather(quorum_id, members)
        self._leader.untold[:] = [False] * len(self._groups)  # messages that were lost with their connections
        if not self._search(may_form, "", may_lose=True, may_end_leases=True):
            joined = [g for g, join in enumerate(self._leader.joins) if join is not None]
            self._refuse(f"a quorum of {members} forms; joined: {joined}, {self._leader.phase} {self._leader.lease}")
        if not self._try("form", 0):
            self._do("form_without_stragglers", 0)
        place = self._leader.quorum
        if self._ids and quorum_id <= max(self._ids):
            self._refuse(f"the id is not above {max(self._ids)}")
        self._ids[quorum_id] = place

    def _gather(self, quorum_id: int, members: list[int]) -> None:
        """The joins of these groups have arrived, and others have ended."""
        leader = self._leader
        for name, g in self._places.items():
            follower, is_in = self._groups[g], g in members
            answered = self._answered.get((name, quorum_id), 0)
            while any(kind == "join" and self._trace[at][2].number <= answered for kind, _, at in follower.arriving):
                self._do_hidden("arrive", g)
            kinds = ("join",) if is_in else ("withdraw", "leave")
            while (leader.joins[g] is not None) != is_in and any(kind in kinds for kind, _, _ in follower.arriving):
                self._do_hidden("arrive", g)
            if is_in and leader.untold[g]:
                self._come_back(g)
            if leader.joins[g] is not None and not is_in and follower.is_refused:
                leader.joins[g] = None
            elif leader.joins[g] is not None and not is_in:
                self._do_hidden("lose", g)

    def _come_back(self, g: int) -> None:
        """The group was lost before its last session began, so its join is for another quorum."""
        self._do_hidden("lose", g)
        self.model.open_session(self.world, g, 0)
        self.model.deliver(self.world, 0, g, self.world.groups[g].join())

    def _answer(self, g: int, quorum_id: int) -> None:
        self._expect("the quorum of the answer", self._ids[quorum_id], self._leader.quorum)
        if not self.world.is_member(self._leader.quorum, g):
            return self.world.change(self._leader.quorum, is_told=True)  # to a process that has died
        if self.world.groups[g].mail == self._leader.quorum:
            return None  # once more, on a newer session
        if not self._search(lambda: self._leader.untold[g], "", may_lose=False):
            self._refuse("it receives an answer, but has not joined")
        return self._do("tell", 0, g)

    # -- what a trace does not show

    def _search(self, is_so: Any, lost: str, *, may_lose: bool, may_end_leases: bool = False) -> bool:
        for most in range(MOST_HIDDEN + 1):
            if self._search_up_to(most, is_so, lost, may_lose=may_lose, may_end_leases=may_end_leases):
                return True
        return self._receive_in_order(is_so)

    def _receive_in_order(self, is_so: Any) -> bool:
        """Let all that was sent arrive in the order in which it was sent, until `is_so`."""
        kept, before = self.world, [deque(f.arriving) for f in self._groups]
        self.world = World(kept.freeze())
        while waiting := [(f.arriving[0][2], g) for g, f in enumerate(self._groups) if f.arriving]:
            self._do_hidden("arrive", min(waiting)[1])
            if is_so():
                return True
            arrived = self.world
            self.world = World(arrived.freeze())
            if self._do_hidden("review", 0) and is_so():
                return True
            self.world = arrived
        self.world = kept
        for follower, arriving in zip(self._groups, before, strict=True):
            follower.arriving = arriving
        return False

    def _search_up_to(self, most: int, is_so: Any, lost: str, *, may_lose: bool, may_end_leases: bool) -> bool:
        if not most:
            return is_so()
        for hidden in self._hidden(lost, may_lose=may_lose, may_end_leases=may_end_leases):
            kept, arriving = self.world, [deque(f.arriving) for f in self._groups]
            self.world = World(kept.freeze())
            if self._do_hidden(*hidden) and self._search_up_to(
                most - 1, is_so, lost, may_lose=may_lose, may_end_leases=may_end_leases
            ):
                return True
            self.world = kept
            for follower, before in zip(self._groups, arriving, strict=True):
                follower.arriving = before
        return False

    def _hidden(self, lost: str, *, may_lose: bool, may_end_leases: bool) -> Iterator[tuple[str, int]]:
        for g, follower in enumerate(self._groups):
            if follower.arriving:
                yield "arrive", g
        if self._leader.phase == STANDS:
            yield "review", 0
        if may_end_leases and (any(self._leader.lease) or any(self._leader.unknown)):
            yield "leases", 0
        if may_lose:
            yield "stop_returning", 0
            for g in [self._places[lost]] if lost in self._places else range(len(self._groups)):
                if self._leader.session[g] != NOTHING:
                    yield "lose", g

    def _do_hidden(self, name: str, g: int) -> bool:
        world = self.world
        if name == "arrive":
            kind, content, _ = self._groups[g].arriving.popleft()
            self._arrive(g, kind, content)
            return True
        if name == "review":
            before = self._leader.phase
            self.model.review(world, self._leader)
            return self._leader.phase != before
        if name == "lose":
            self.model.do(world, "cut", g)
            is_lost = self._try("lose", 0, g)
            if self._places.get(self._trace[self._number][1].split(".")[0]) == g:  # it has come back meanwhile
                self.model.open_session(world, g, 0)
            return is_lost
        for h in range(len(self._groups)):
            if name == "leases" or not self._leader.back[h]:
                if self._leader.joins[h] is None and (self._leader.lease[h] or self._leader.unknown[h]):
                    world.groups[h].has_lease = False
                self.model.do(world, "lease_ends", 0, h)
        return True if name == "leases" else self._try("stop_returning", 0)

    # -- answers of a manager to its ranks

    def _answers(self, g: int, rank: str, message: Any) -> None:
        match message:
            case ("on_quorum", Assignment() as assignment):
                self._enter(g, rank, assignment)
            case ("on_decision", commit, following):
                self._decide(g, rank, commit=commit)
                if following is not None:
                    self._enter(g, rank, following)
            case session.Revoked(quorum_id) if quorum_id in self._ids:
                group = self.world.groups[g]
                is_held = group.quorum == self._ids[quorum_id] and group.mode in (STANDS, RECALLED, RESUMED)
                if is_held and not self._obey(g, REVOKED):
                    self._do("fail", g)
            case _:
                pass

    def _enter(self, g: int, rank: str, assignment: Assignment) -> None:
        """A rank is let into a step: the first one of a quorum, or one that its manager grants."""
        group, step = self.world.groups[g], assignment.max_step
        place = self._ids.get(assignment.quorum_id)
        if place is None:
            raise self._refused("its quorum has not formed")
        self._at[rank] = (place, step)
        if group.quorum == place and step <= group.granted:
            return  # another rank of the group
        if group.quorum != place:
            self._do("take", g)
            self._expect("the quorum", place, group.quorum)
            self._expect("its first step", step, self.world.quorums[group.quorum].start)
            members = tuple(self._places[name] for name in assignment.replica_ids)
            self._expect("the list", members, tuple(m for m, _ in self.world.quorums[group.quorum].members))
        elif not assignment.revoked:
            if group.mode == RECALLED:
                self._obey(g, RESUMED)
            self._do("grant", g)
            self._expect("the granted step", step, group.granted)
        if assignment.revoked:
            self._obey(g, REVOKED)
        self._go_on(group.quorum)

    def _go_on(self, quorum: int) -> None:
        """Heal and add as soon as that is possible. A failure after it shows as a no."""
        for g, group in enumerate(self.world.groups):
            if group.work and group.work[0] == quorum and group.work[2] == HEALS:
                before = group.step, group.tag, group.content, group.is_torn
                if self._try("heal", g):
                    self._groups[g].before_heal = before
        self._try("reduce", quorum)

    def _decide(self, g: int, rank: str, *, commit: bool) -> None:
        """The decision on the step that this rank is in. The first rank that receives it counts."""
        work = self.world.groups[g].work
        if work and work[:2] == self._at.get(rank):
            self._go_on(work[0])
        work = self.world.groups[g].work
        if work and work[:2] == self._at.get(rank):
            if commit:
                self._groups[g].before_heal = None
            self._do("commit" if commit else "fail", g)


def _answered_joins(trace: Sequence[Sent]) -> dict[tuple[str, int], int]:
    """Return the number of the join of each group that a quorum answers."""
    numbers: dict[tuple[str, int], int] = {}
    for _, to, message in trace:
        match message:
            case session.JoinAccepted(join, quorum):
                numbers.setdefault((to.split(".")[0], quorum.quorum_id), join)
            case session.QuorumChanged(join, change):
                numbers.setdefault((to.split(".")[0], change.quorum_id), join)
            case _:
                pass
    return numbers


def until_end(trace: Sequence[Sent]) -> Sequence[Sent]:
    """At the end of a run all scripts end, which the model leaves out."""
    for number, (_, _, message) in enumerate(trace):
        held = message.levels.held if isinstance(message, session.Hello | session.Heartbeat) else None
        if held is not None and held.mode is session.HoldState.LEAVING:
            return trace[:number]
    return trace


def check_trace(trace: Sequence[Sent]) -> Conformance:
    """Raise NotAllowed at the first message that the model does not allow."""
    conformance = Conformance(trace)
    conformance.run()
    return conformance
