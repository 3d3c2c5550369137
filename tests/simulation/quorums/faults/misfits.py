"""Misfits: callers that send what no correct peer sends.

The receiver refuses it with an error that names the fault, or it has no effect. No other group notices it (S13).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agent_client.step.rules.machine import Phase
from lighthouse_protocol.messages.membership import Assignment, Decision, Participant
from lighthouse_protocol.messages.session import (
    GroupReport,
    HeldQuorum,
    Hello,
    HoldState,
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    QuorumOrder,
    QuorumPhase,
    Welcome,
)
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, LighthouseError, LimitReached, WrongState
from tests.simulation.faults import Fault
from tests.simulation.network import End
from tests.simulation.quorums.faults.groups import find_group
from tests.simulation.quorums.faults.kinds import fault
from tests.simulation.quorums.faults.managers import find_native
from tests.simulation.quorums.manager import ManagerProcess
from tests.simulation.quorums.torchft_manager import UnaryAnswer, UnaryQuorum
from tests.simulation.world import Process, violated

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.rank import Rank
    from tests.simulation.quorums.simulation import QuorumSimulation

ANSWERED_WITHIN_S = 2.0
TIME_LEFT_S = 10.0
GHOST_STAYS_S = 0.3
DAYS_AHEAD = 40 * 24 * 3600 * 1000
STEPS_AHEAD = 7
NO_JOIN = 1_000_000  # the number of no join of a manager
NOT_THE_SECRET = "what another manager would show"
NEED_ROOM = ("another_width", "loopback", "id_never_given_out", "holds_what_it_never_had", "speaks_for_another")
NEED_NO_ROOM = ("one_too_many",)
OTHERS_MODES = (HoldState.STANDING, HoldState.JOINING, HoldState.LEAVING, HoldState.REVOKED)


# -- at the lighthouse


@dataclass(frozen=True, slots=True)
class Expected:
    """The refusal that a misfit must receive. Its text must contain `blames`."""

    error: type[LighthouseError]
    blames: str

    def check(self, what: str, outcome: object) -> None:
        if not isinstance(outcome, self.error):
            violated("S13", f"{what} is to be refused by {self.error.__name__}, and gets {outcome}")
        if self.blames not in str(outcome):
            violated("S13", f"the refusal of {what} does not name {self.blames}: {outcome}")


class Outsider(Process):
    """A connection from another host that sends `words` and waits for an answer.

    If `expected` is None, the caller is admitted but must not be told to continue.
    """

    def __init__(self, simulation: "QuorumSimulation", words: Sequence[Any], expected: Expected | None) -> None:
        number = simulation.next_number()
        super().__init__(simulation.world, f"outsider-{number}", f"outside-{number}")
        self._simulation = simulation
        self._words = words
        self._expected = expected
        self._is_answered = False
        lighthouse = simulation.lighthouse.process
        assert lighthouse is not None
        simulation.begin()
        simulation.network.connect(self, lighthouse, lighthouse.accept, self._connected, self._fail)
        self.after(ANSWERED_WITHIN_S, self._fail)

    def _connected(self, end: End) -> None:
        end.on_message = lambda message: self._receive(end, message)
        for word in self._words:
            end.send(word)

    def _receive(self, end: End, message: Any) -> None:
        match message:
            case UnaryAnswer(_, outcome) | JoinRejected(_, outcome):
                self._finish(end, outcome)
            case Welcome() if len(self._words) > 1:
                pass  # it is about what it says then
            case JoinAccepted() | Welcome() if not self._is_answered:
                self._finish(end, message)
            case _:
                pass

    def _finish(self, end: End, outcome: object) -> None:
        if self._is_answered:
            return
        self._is_answered = True
        what = f"{self._words[0]}"
        if self._expected is not None:
            self._expected.check(what, outcome)
        elif not isinstance(outcome, Welcome):
            violated("S13", f"{what} is to be welcomed, and gets {outcome}")
        elif outcome.order is not None and outcome.order.phase in (QuorumPhase.STANDING, QuorumPhase.RESUMED):
            violated("S13", f"{what} is no participant, and is told to go on: {outcome.order}")
        self.after(GHOST_STAYS_S, self._leave, end)

    def _leave(self, end: End) -> None:
        end.close()
        self._simulation.end()

    def _fail(self) -> None:
        if not self._is_answered:
            violated("S13", f"{self._words[0]} gets no answer within {ANSWERED_WITHIN_S:g} s")


def find_with_session(simulation: "QuorumSimulation", fault: Fault) -> "Group | None":
    """Return a group of ours with an open session."""
    lighthouse = simulation.lighthouse.process

    def has_session(group: "Group") -> bool:
        member = lighthouse.machine.job.groups.get(group.replica_id) if lighthouse is not None else None
        return isinstance(group.manager, ManagerProcess) and member is not None and member.is_connected

    return find_group(simulation, fault, has_session)


def like(simulation: "QuorumSimulation", group: "Group", **changes: Any) -> Participant:
    """Return a participant like those of a training group, on another host."""
    number = simulation.next_number()
    address = f"10.9.{number % 250}.1"
    stranger = Participant(
        f"misfit-{number}",
        incarnation=f"misfit-{number}-1",
        address=f"{address}:29511",
        store_address=f"{address}:29600",
        group_world_size=group.size,
        step=group.ranks[0].machine.step,
    )
    return replace(stranger, wire_id="", **changes)


def ask(
    simulation: "QuorumSimulation", participant: Participant, error: type[LighthouseError], blames: str = ""
) -> None:
    """Request a quorum, either in a call as torchft's clients do, or in a session."""
    is_call = simulation.world.random.random() < 0.5
    words = UnaryQuorum(1, participant, TIME_LEFT_S) if is_call else Hello(participant, secret=NOT_THE_SECRET)
    Outsider(simulation, [words], Expected(error, blames or participant.replica_id))


@fault(find_group, weight=0)
def another_width(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a group comes whose number of ranks is another one"""
    ask(simulation, like(simulation, group, group_world_size=group.size + 1), WrongState)


@fault(find_group, weight=0)
def loopback(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a group comes that advertises a loopback address, beside others that advertise their hosts'"""
    ask(simulation, like(simulation, group, address="127.0.0.1:29511", store_address="127.0.0.1:29600"), WrongState)


@fault(find_group, weight=0)
def id_never_given_out(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a group says that it was told a quorum_id, or holds a state of one, that lies weeks ahead"""
    field = simulation.world.random.choice(("seen_quorum_id", "tag_quorum_id"))
    ahead = simulation.checkers.newest_id + DAYS_AHEAD
    ask(simulation, like(simulation, group, **{field: ahead}), InvalidRequest, str(ahead))


@fault(find_group, weight=0)
def one_too_many(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a group comes that is one more than the lighthouse takes"""
    ask(simulation, like(simulation, group), LimitReached)


@fault(find_group, weight=0)
def same_name(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a group comes with the replica_id of one that trains"""
    ask(simulation, like(simulation, group, replica_id=group.replica_id), DuplicateReplica)


@fault(find_group, weight=0)
def holds_what_it_never_had(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a manager says that it holds the quorum, or an older one, or has given it up, and is in none of them"""
    r = simulation.world.random
    quorum_id = simulation.checkers.newest_id - r.choice((0, 0, 1))
    held = HeldQuorum(quorum_id, r.choice(OTHERS_MODES), group.ranks[0].machine.step + STEPS_AHEAD)
    down = r.choice(("", "its ranks are started again"))
    Outsider(simulation, [Hello(like(simulation, group), GroupReport(held, down=down), NOT_THE_SECRET)], None)


@fault(find_with_session, weight=0)
def impostor(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """somebody comes as a group that trains, with its incarnation and what it holds, and not with its secret"""
    r = simulation.world.random
    manager = group.manager
    assert isinstance(manager, ManagerProcess)
    stranger = like(simulation, group, replica_id=group.replica_id, incarnation=manager.incarnation)
    if r.random() < 0.3:
        words: Any = UnaryQuorum(1, stranger, TIME_LEFT_S)
    else:
        held = r.choice((None, manager.machine.held))
        words = Hello(stranger, GroupReport(held), r.choice(("", NOT_THE_SECRET)))
    Outsider(simulation, [words], Expected(DuplicateReplica, group.replica_id))


@fault(find_with_session, weight=0)
def speaks_for_another(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a group has a session of its own, and joins by it in the name of one that trains"""
    manager = group.manager
    assert isinstance(manager, ManagerProcess)
    incarnation = simulation.world.random.choice((manager.incarnation, "another"))
    own, other = like(simulation, group), like(simulation, group, replica_id=group.replica_id, incarnation=incarnation)
    words = [Hello(own, secret=NOT_THE_SECRET), JoinRequest(1, other, TIME_LEFT_S)]
    Outsider(simulation, words, Expected(InvalidRequest, own.replica_id))


# -- at a manager


@dataclass(frozen=True, slots=True)
class Refused:
    """A lighthouse_runtime.ports.Reply that checks the refusal. With `may_discard`, a no may also count as a no."""

    what: str
    expected: Expected
    may_discard: bool = False

    def answer(self, value: object) -> None:
        if not self.may_discard or value != Decision(False):
            self.expected.check(self.what, value)

    def refuse(self, error: LighthouseError) -> None:
        self.expected.check(self.what, error)


def find_computing(simulation: "QuorumSimulation", fault: Fault) -> "Group | None":
    """Return a group in the middle of a step."""
    return find_group(simulation, fault, lambda group: bool(computing(group)))


def computing(group: "Group") -> "list[Rank]":
    return [rank for rank in group.ranks if rank.machine.phase is Phase.COMPUTING and rank.machine.assignment]


def step_of(group: "Group") -> Assignment:
    assignment = computing(group)[0].machine.assignment
    assert assignment is not None
    return assignment


def at_manager(group: "Group", act: Callable[[ManagerProcess], object]) -> None:
    manager = group.manager
    assert isinstance(manager, ManagerProcess)
    manager.after(0.0, act, manager)


def vote(simulation: "QuorumSimulation", group: "Group", expected: Expected, **fields: Any) -> None:
    """A no, by a call, for something that is not voted on."""
    rank, step = simulation.world.random.choice(group.ranks), step_of(group)
    said = {"group_rank": rank.group_rank, "step": step.max_step, "quorum_id": step.quorum_id, "vote": False}
    said |= fields
    reply = Refused(f"a vote {said} at {group.name}", expected, may_discard=True)
    at_manager(group, lambda manager: manager.driver.vote(reply, TIME_LEFT_S, **said))


@fault(find_computing, weight=0)
def vote_for_another_step(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a rank votes for a step that nobody is in"""
    step, said = step_of(group).max_step + STEPS_AHEAD, simulation.world.random.random() < 0.5
    vote(simulation, group, Expected(WrongState, "step"), step=step, vote=said)


@fault(find_computing, weight=0)
def vote_for_another_quorum(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a rank votes under a quorum that nobody was told of"""
    quorum_id, said = step_of(group).quorum_id + STEPS_AHEAD, simulation.world.random.random() < 0.5
    vote(simulation, group, Expected(WrongState, "quorum_id"), quorum_id=quorum_id, vote=said)


@fault(find_native, weight=0)
def no_after_the_commit(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a rank votes no for the last step that its group has committed"""
    rank = min(group.ranks, key=lambda rank: rank.machine.step)
    machine = rank.machine
    if group.size == 1 or not rank.commits:  # a rank alone knows of it before its manager
        return
    reply = Refused(f"a no for step {machine.step - 1} at {group.name}", Expected(WrongState, "step"), may_discard=True)
    said = {"group_rank": 0, "step": machine.step - 1, "quorum_id": machine.tag_quorum_id, "vote": False}
    at_manager(group, lambda manager: manager.driver.vote(reply, TIME_LEFT_S, **said))


@fault(find_computing, weight=0)
def no_such_rank(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a rank votes, or asks for a quorum, that its group does not have"""
    expected = Expected(InvalidRequest, "rank")
    if simulation.world.random.random() < 0.5:
        return vote(simulation, group, expected, group_rank=group.size)
    reply = Refused(f"a request of rank {group.size} at {group.name}", expected)
    fields = {"group_rank": group.size, "step": group.ranks[0].machine.step}
    return at_manager(group, lambda manager: manager.driver.ask(reply, TIME_LEFT_S, **fields))


@fault(find_native, weight=0)
def step_goes_back(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a manager joins at step 0, with the incarnation with which it has joined at a later one"""

    def say_join(manager: ManagerProcess) -> None:
        participants = manager.handed.participants if manager.handed is not None else ()
        if mine := next((p for p in participants if p.replica_id == group.replica_id and p.step), None):
            manager.tell_lighthouse(JoinRequest(NO_JOIN, replace(mine, step=0, tag_quorum_id=0), TIME_LEFT_S))

    at_manager(group, say_join)


@fault(find_native, weight=0)
def watch_before_the_end_of_the_last(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """a rank opens its next watch, and the end of its last one comes later"""
    rank: Rank = simulation.world.random.choice(group.ranks)

    def open_next(manager: ManagerProcess) -> None:
        if rank.is_up:
            old = rank.watch
            manager.on_watch(rank)
            manager.after(GHOST_STAYS_S, manager.on_watch_end, old)

    at_manager(group, open_next)


# -- what the lighthouse says to a manager


def send_to_manager(group: "Group", message: Any) -> None:
    at_manager(group, lambda manager: manager.driver.handle_message(message))


@fault(find_native, weight=0)
def answer_repeated(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """the answer to a group's last join, or to one that it never sent, comes again; or a refusal of it"""
    r = simulation.world.random
    assert isinstance(group.manager, ManagerProcess)
    accepted = group.manager.accepted
    if accepted is None:
        return
    join = accepted.join + r.choice((0, 0, 1))
    quorum = replace(accepted.quorum, quorum_id=accepted.quorum.quorum_id - r.choice((0, 1)))
    send_to_manager(
        group, r.choice((JoinAccepted(join, quorum, accepted.stands), JoinRejected(join, WrongState("too late"))))
    )


@fault(find_native, weight=0)
def order_for_another_quorum(simulation: "QuorumSimulation", group: "Group", fault: Fault) -> None:
    """an order about a quorum that is over, or was never told, comes to a manager"""
    r = simulation.world.random
    quorum_id = simulation.checkers.newest_id + r.choice((-1, 1))
    phase = r.choice((QuorumPhase.REVOKED, QuorumPhase.RECALLED, QuorumPhase.RESUMED))
    send_to_manager(group, QuorumOrder(quorum_id, phase, reason="a misfit says so"))
