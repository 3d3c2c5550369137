"""One rank: the Agent's step around the pure StepMachine, with a hash as the model.

A step is: ask, serve or heal, compute, all-reduce over all participants, vote, and commit or discard. A rank that may
have to heal installs the state before it computes. If it learns later that it must heal, it adds zeros and votes no.
The model is a hash over (state, step, sum of the contributions, divisor), so a divergence or a missing contribution
changes it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_client.step.rules.machine import Phase, StepMachine
from agent_client.step.rules.news import RetryPolicy
from lighthouse_protocol.messages.membership import PLAIN, Assignment, DistrustKind, Tag
from lighthouse_protocol.refusals import DeadlinePassed, Drained, LighthouseError, Superseded, Unreachable
from tests.simulation.network import LOCAL_DELAY_S
from tests.simulation.quorums.collectives import Arrival
from tests.simulation.quorums.follower import Follower, Step
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.manager import ManagerProcess
    from tests.simulation.quorums.torchft_manager import TorchftManager

RECONNECT_S = 0.2
CRASHES_AFTER_S = (0.0, 0.0004, 0.001, 0.01)
CANCELLED_AFTER_S = (0.0001, 0.0005, 0.02, 0.3)
REPEATED = (TimeoutError, Superseded, Unreachable)
FETCH_RETRY_S = 0.05
MANAGER_RETURNS_WITHIN_S = 10.0
REVOKED_KEPT = 64
COPIES_KEPT = 4
RELEASED_WITHIN_S = 10.0
ENDS_IN_S = (0.0, 0.0, 0.05, 1.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    state: int | None
    step: int
    tag_quorum_id: int | None
    batches: int = 0


class Rank(Process):
    """`token` numbers the calls to the manager. Answers to other calls than the present one are late and ignored."""

    def __init__(self, site: "Group", group_rank: int, rank_incarnation: str, snapshot: Snapshot) -> None:
        super().__init__(site.world, f"{site.name}.{group_rank}", site.host)
        self.site = site
        self.machine = StepMachine(step=snapshot.step, tag_quorum_id=snapshot.tag_quorum_id, is_alone=site.size == 1)
        self.token = 0
        self.watch = 0
        self._called = -1  # the last call
        self._has_started = False
        self.after(LOCAL_DELAY_S, self.watch_again)
        self.plan = site.plan
        self.group_rank = group_rank
        self.rank_incarnation = rank_incarnation
        self.wire_id = site.wire_id
        self.votes = site.votes
        self.state: int | None = snapshot.state
        self.has_vanished = False
        self.began_at = self.world.now
        self.commits = self.discards = 0
        self.served: tuple[tuple[int, int], Snapshot] | None = None
        self.copies: dict[tuple[int, int], Snapshot] = {}
        self.follower = Follower(self) if site.may_catch_up else None
        self._received: Snapshot | None = None
        self._sum = 0
        self._transformed_by: int | None = None
        self._entered: int | None = None
        self._revoked: dict[int, None] = {}
        self._round = 0
        self._patience = RetryPolicy(site.plan.refusals)
        self._is_leaving = False
        self._has_done_all = False  # of its script
        self._has_told = False
        self._ballot: tuple[bool, dict[str, Any]] = (False, {})
        self.on_death.append(self._die)

    @property
    def manager(self) -> "ManagerProcess | TorchftManager":
        return self.site.manager

    @property
    def quorum_id(self) -> int:
        return self._entered or 0

    @property
    def catches_up(self) -> bool:
        """True if this rank, or another rank of its group, catches up."""
        assignment = self.machine.assignment
        return self.is_catching_up or (assignment is not None and assignment.catches_up)

    @property
    def is_catching_up(self) -> bool:
        return self.follower is not None and self.follower.is_catching_up

    @property
    def held(self) -> Tag:
        """The tag of the state that the rank holds. It has no quorum_id if the rank holds none."""
        return (self.follower.catch_up.held if self.follower is not None else None) or Tag(*self.machine.tag)

    @property
    def says_heals_first(self) -> bool | None:
        return self.machine.heals_first

    @property
    def _max_step(self) -> int:
        return self.machine.assignment.max_step if self.machine.assignment else self.machine.step

    # -- the watch

    def _watch(self) -> None:
        self.world.at(self.world.now + LOCAL_DELAY_S, self.manager, self.manager.on_watch, self)

    def watch_again(self) -> None:
        """Open a watch as soon as the manager is up."""
        if self.manager.is_up:
            self._watch()
        else:
            self.after(RECONNECT_S, self.watch_again)

    def on_watched(self, manager: "ManagerProcess | TorchftManager") -> None:
        if not self._has_started:
            self._has_started = True
            self.begin_step()

    def on_watch_end(self) -> None:
        """Handle a broken watch as a revoke, and open the next one a little later."""
        self.on_revoked(self.quorum_id)
        self.after(self.world.random.uniform(0.05, 0.5), self._watch)

    def on_manager_gone(self, manager: "ManagerProcess | TorchftManager") -> None:
        if manager is not self.manager and self.manager.knows(self):
            return None  # it was paused meanwhile, and has met the next one
        if not self.site.manager_returns:
            return self.exit("its manager is gone", explained_by="its manager has died")
        self.on_revoked(self.quorum_id)
        self.end_call(Unreachable("the manager is gone"))
        self.after(MANAGER_RETURNS_WITHIN_S, self._give_up, manager)
        return self.watch_again()

    def _give_up(self, manager: "ManagerProcess | TorchftManager") -> None:
        if manager is self.manager:
            self.exit("its manager is not back", explained_by="its manager has died")

    def on_mate_gone(self, reason: str) -> None:
        self.exit(f"its group is lost: {reason}", explained_by="another rank of its group is gone")

    def on_revoked(self, quorum_id: int) -> None:
        self._revoked[quorum_id] = None
        while len(self._revoked) > REVOKED_KEPT:
            del self._revoked[next(iter(self._revoked))]
        machine = self.machine
        if self._is_leaving:
            return
        if quorum_id == self._entered and machine.phase in (Phase.ASKED, Phase.COMPUTING) and not machine.has_reduced:
            if machine.phase is Phase.COMPUTING:
                machine.fail_step("revoked")
            self._drop()

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
        """End the present call because its connection broke."""
        if self._called == self.token:
            self.on_refused(self.token, error)

    def _cancel_if_waiting(self, token: int) -> None:
        if token == self.token:
            self.world.counts["calls cancelled"] += 1
            self.cancel("cancelled")

    def _lost_call(self, token: int) -> None:
        """Give up a call without an answer: the manager is paused or dead."""
        if token == self.token and self.machine.phase in (Phase.ASKED, Phase.VOTED):
            self.cancel("no answer in time")

    def cancel(self, reason: str) -> None:
        """End the waiting call without an answer."""
        token = self.token
        manager = self.manager
        self.world.at(self.world.now + LOCAL_DELAY_S, manager, manager.on_cancel, self, token)
        self.on_refused(token, TimeoutError(reason))

    # -- the quorum

    def begin_step(self) -> None:
        self._begin_asking()
        self._ask()

    def _begin_asking(self) -> None:
        machine = self.machine
        self.machine.ask(heals_first=machine.may_heal or machine.tag_quorum_id is None or self.is_catching_up)
        self._sum, self._received = 0, None

    def _ask(self) -> None:
        self.call_manager("on_ask", self.plan.quorum_timeout_s, self._fields())

    def lie(self, **fields: Any) -> None:
        """Send one more request, with false fields. Its answer is ignored."""
        self.site.has_lied = True
        self.after(0, self.manager.on_ask, self, -self.token - 1, self.plan.quorum_timeout_s, self._fields() | fields)

    def _fields(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "group_rank": self.group_rank,
            "step": machine.step,
            "checkpoint_address": f"{self.site.address}/{self.group_rank}",
            "tag_quorum_id": machine.tag_quorum_id,
            "rank_incarnation": self.rank_incarnation,
            "shrink_only": self.site.shrinks,
            "init_sync": self.plan.init_sync,
            "commit_failures": machine.discards,
            "distrust": machine.distrust,
            "catch_up": self.follower.request_fields() if self.follower is not None else PLAIN,
            "heals_first": self.says_heals_first,
        }

    def on_quorum(self, token: int, assignment: Assignment) -> None:
        if token != self.token or self.machine.phase is not Phase.ASKED:
            return
        self.token += 1
        self._begin(assignment)

    def on_refused(self, token: int, error: Exception) -> None:
        if token != self.token:
            return None
        self.token += 1
        if self._has_told:
            return self._yes_refused(error)
        if self.machine.phase is Phase.VOTED:
            return self._vote_refused(error)
        if self.machine.phase is not Phase.ASKED:
            return None
        if isinstance(error, Drained):
            self._is_leaving = True  # it keeps its process group until the manager has left
            return None
        reason = self._patience.record_refusal(_as_refusal(error), self.world.now)
        if reason:
            self.site.must_agree = True
            explained_by = self.site.why_refused(error)
            return self.exit(f"refused: {reason}", explained_by=explained_by)
        self.world.counts["steps without a quorum"] += 1
        self.log(f"has no quorum for step {self.machine.step}: {error}")
        self.machine.record_quorum_failure(str(error))
        self.after(self._patience.backoff_s, self._vote, self._next_round())
        return None

    # -- the step

    def _next_round(self) -> int:
        self._round += 1
        return self._round

    def _begin(self, assignment: Assignment) -> None:
        machine = self.machine
        machine.accept_assignment(assignment)
        self._patience.reset()
        told_at = self.site.checkers.told_at[assignment.quorum_id]
        if not assignment.revoked and self.site.is_as_it_was(told_at):  # else it says nothing of a rank that is new
            is_late = assignment.place is None and not assignment.heals
            self.site.is_apart = assignment.heals or assignment.catches_up or (is_late and self.site.is_apart)
        if self.follower is not None:
            self.follower.answered(assignment)
        self.site.checkers.begun(self, assignment)
        if assignment.quorum_id != self._entered:
            self._drop()
            self._entered = assignment.quorum_id
            self.site.collectives.enter(assignment.quorum_id, self.group_rank, assignment.replica_ids)
        if assignment.revoked or assignment.quorum_id in self._revoked:
            machine.fail_step("revoked")
        elif machine.has_no_heal_source:
            return self.exit("holds no state, and no other group can heal them")
        elif machine.is_unhealed:
            machine.fail_step("torn")
            self._drop()
        self._serve(assignment)
        this_round = self._next_round()
        if machine.must_install and not machine.heals_first:
            if assignment.place is not None:
                return self._fail(this_round, "the peers count on a state that this rank does not hold")
        elif assignment.heals and not assignment.catches_up and machine.failure is None:
            give_up_at = self.world.now + self.plan.heal_timeout_s
            return self._fetch(this_round, assignment, give_up_at)
        return self._compute(this_round)

    def _serve(self, assignment: Assignment) -> None:
        self.served = None
        machine = self.machine
        if assignment.serve_to and not machine.is_torn:
            snapshot = Snapshot(self.state, machine.step, machine.tag_quorum_id, machine.batches_committed)
            key = assignment.quorum_id, assignment.max_step
            self.served = key, snapshot
            if set(assignment.serve_to) & set(assignment.catching_up):
                self.copies[key] = snapshot
                while len(self.copies) > COPIES_KEPT:
                    del self.copies[next(iter(self.copies))]

    def _fetch(self, this_round: int, assignment: Assignment, give_up_at: float) -> None:
        """Copy a source's state. The copy takes time, and ends with its source, a cut or a revoke."""
        if this_round != self._round:
            return None
        machine = self.machine
        source = self.site.find_rank(assignment.heal_from_address, self.group_rank)
        if self.world.now >= give_up_at or machine.failure is not None:
            return self._fail(this_round, machine.failure or "no peer's state in time")
        key = assignment.quorum_id, assignment.max_step
        network = self.site.network
        if source is None or not source.is_up or source.served is None or source.served[0] != key:
            return self.after(FETCH_RETRY_S, self._fetch, this_round, assignment, give_up_at)
        if network.is_cut(source.host, self.host) or network.is_cut(self.host, source.host):
            return self.after(FETCH_RETRY_S, self._fetch, this_round, assignment, give_up_at)
        took_s = self.plan.heal_s * self.world.random.uniform(0.5, 1.5)
        return self.after(took_s, self._fetched, this_round, source, source.served[1], give_up_at, assignment)

    def _fetched(
        self, this_round: int, source: "Rank", snapshot: Snapshot, give_up_at: float, assignment: Assignment
    ) -> None:
        if this_round != self._round:
            return None
        network = self.site.network
        if not source.is_up or self.machine.failure is not None or self.happens("a transfer broke", self.plan.breaks):
            return self._fail(this_round, "the transfer broke")
        if network.is_cut(source.host, self.host) or source.is_paused:
            return self._fetch(this_round, assignment, give_up_at)
        self._received = snapshot
        self.log(f"has received step {snapshot.step} of quorum {snapshot.tag_quorum_id} from {source.name}")
        if snapshot.step != self._max_step:
            return self._fail(this_round, f"the state received is of step {snapshot.step}")
        self.machine.begin_install()
        self.state = None
        return self.after(self.world.random.uniform(0, 0.02), self._install, this_round)

    def _compute(self, this_round: int) -> None:
        if self._has_done_all:
            return
        spread = self.plan.step_spread * self.plan.step_s
        step_s = self.plan.step_s + spread * (2 * self.world.random.random() - 1)
        self.after(step_s * (1 - self.plan.pause), self._reduce, this_round)

    def _reduce(self, this_round: int) -> None:
        machine = self.machine
        assignment = machine.assignment
        if this_round != self._round or assignment is None:
            return None
        if machine.failure is None and assignment.quorum_id in self._revoked:
            machine.fail_step("revoked")
        if machine.failure is not None:
            return self._fail(this_round, machine.failure)
        state = self.state if machine.contributes else None
        if machine.contributes:
            self.site.checkers.contributes(self, assignment)
        arrival = Arrival(self, state, assignment.contributors, lambda ok, total: self._on_sum(this_round, ok, total))
        key = assignment.quorum_id, self.group_rank
        self.site.collectives.arrive(*key, assignment.max_step, arrival, self.wire_id)
        limit_s = self.plan.collective_timeout_s
        if assignment.has_healing:
            limit_s += self.plan.heal_timeout_s
        return self.after(limit_s, self._collective_over, this_round, limit_s)

    def _collective_over(self, this_round: int, limit_s: float) -> None:
        if this_round == self._round and self.machine.phase is Phase.COMPUTING and not self.machine.has_reduced:
            self.machine.fail_step(f"no sum within {limit_s:.1f} s")
            self._drop()

    def _on_sum(self, this_round: int, is_ok: bool, total: int) -> None:
        if this_round != self._round:
            return None
        if not is_ok:
            return self._fail(this_round, "the all-reduce failed")
        self._sum, self._transformed_by = total, self.state
        self.machine.record_reduction()
        return self._vote(this_round)

    def _install(self, this_round: int) -> None:
        received = self._received
        if this_round != self._round or received is None:
            return None
        if self.happens("an install broke", self.plan.breaks):
            return self.exit("the install of a peer's state broke", explained_by="a drawn break")
        self.state = received.state
        self.machine.finish_install(received.step, received.tag_quorum_id, received.batches)
        return self._compute(this_round)

    def report_error(self, reason: str) -> None:
        self.machine.fail_step(reason)

    def happens(self, what: str, share: float) -> bool:
        happens = share > 0 and not self.world.is_calm and self.world.random.random() < share
        self.world.counts[what] += happens
        return happens

    def _fail(self, this_round: int, reason: str) -> None:
        """Mark the step as failed, and end it for the peers, too."""
        self.machine.fail_step(reason)
        self._drop()
        self.after(LOCAL_DELAY_S, self._vote, this_round)

    def _drop(self) -> None:
        if self._entered is not None:
            self.site.collectives.drop(self._entered, self.group_rank, self.wire_id)

    # -- the vote

    def _vote(self, this_round: int) -> None:
        machine = self.machine
        if this_round != self._round or machine.phase is not Phase.COMPUTING or self._has_done_all:
            return
        machine.vote()
        fields = {
            "group_rank": self.group_rank,
            "step": self._max_step,
            "vote": machine.failure is None,
            "quorum_id": machine.assignment.quorum_id if machine.assignment else None,
        }
        self._ballot = self._asks_ahead(), fields
        self._cast()
        if machine.has_decided:
            self._has_told = True
            self._conclude(True)

    def _cast(self) -> None:
        self.call_manager("on_vote", self.plan.vote_timeout_s, *self._ballot)

    def _asks_ahead(self) -> bool:
        assignment = self.machine.assignment
        is_free = assignment is None or not assignment.catches_up
        return is_free and (self.plan.wants_next == 1 or self.world.random.random() < self.plan.wants_next)

    def _vote_refused(self, error: Exception) -> None:
        """Conclude a no, which needs no decision, or repeat a yes, which is bound."""
        if self.machine.failure is not None:
            self._conclude(False)
            return self._go_on(None)
        if isinstance(error, LighthouseError) and not isinstance(error, REPEATED):
            explained_by = self.site.why_undecided
            return self.exit(f"voted yes and cannot learn the decision: {error}", explained_by=explained_by)
        self.world.counts["votes repeated"] += 1
        return self._cast()

    def _yes_refused(self, error: Exception) -> None:
        """Repeat a yes that is the decision already, unless the refusal is final."""
        if isinstance(error, LighthouseError) and not isinstance(error, REPEATED):
            return self._go_on(None)
        self.world.counts["votes repeated"] += 1
        return self._cast()

    def on_decision(self, token: int, commit: bool, granted: Assignment | None) -> None:
        if token != self.token:
            return
        self.token += 1
        if not self._has_told:
            self._conclude(commit)
        if self.is_up:
            self._go_on(granted)

    def _go_on(self, granted: Assignment | None) -> None:
        self._has_told = False
        if self.machine.was_committed and self.site.script_ends(self.machine.step):
            self.after(self.world.random.choice(ENDS_IN_S), self._leave)
            self._has_done_all = True
            self.world.counts["scripts ended with a step begun"] += self.site.ends_asking
            return self._next_step(granted) if self.site.ends_asking else None
        pause_s = self.plan.pause * self.plan.step_s if self.machine.was_committed else 0.0
        return self.after(pause_s, self._next_step, granted)

    def _next_step(self, granted: Assignment | None) -> None:
        if granted is None:
            self._ask()
        else:
            self._begin(granted)

    def _leave(self) -> None:
        """End the script. The process stays until the manager releases it."""
        self._is_leaving = True
        self.token += 1
        self._next_round()
        self.log(f"its script ends after step {self.machine.step - 1}")
        manager = self.manager
        self.world.at(self.world.now + LOCAL_DELAY_S, manager, manager.on_leaving, self, self.machine.next_step)
        self.after(RELEASED_WITHIN_S, self.on_released)

    def on_released(self) -> None:
        self.log("is released")
        self.kill()

    def _conclude(self, commit: bool) -> None:
        """Apply the decision and begin the next step."""
        machine = self.machine
        assignment = machine.assignment
        if commit and machine.failure is not None:
            self.site.checkers.forced_commit(self)
        reason = machine.failure
        machine.record_decision(commit)
        if commit and assignment is not None:
            self._apply(Step(assignment.max_step, self._sum, assignment.contributors))
            if not self.is_up:
                return
        if assignment is not None:
            self._count(commit, assignment, reason)
        self._begin_asking()

    def _apply(self, step: Step) -> None:
        if self.follower is not None and self.follower.is_catching_up:
            self.follower.committed(step)
        elif not self.site.is_torchft and self.happens("a commit was not applied", self.plan.skips):
            self.machine.tear(DistrustKind.NOT_APPLIED, f"step {step.step} was not applied")
        elif self._transformed_by == self.state:
            self.state = step.apply(self.state)
        else:  # the script unscales and clips what was summed by the state that it holds then
            self.state = hash((self._transformed_by, step.apply(self.state)))

    def _count(self, commit: bool, assignment: Assignment, reason: str | None) -> None:
        if commit:
            self.commits += 1
            self.site.checkers.committed(self, assignment)
            if not self.is_catching_up and not self.machine.is_torn:
                self.site.checkers.holds(self, Tag(*self.machine.tag))
                self.site.save(self)
            return
        self.discards += 1
        self.log(f"discards step {assignment.max_step} of quorum {assignment.quorum_id}: {reason or 'another rank'}")
        self.site.checkers.discarded(self, assignment)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.state, self.machine.step, self.machine.tag_quorum_id, self.machine.batches_committed)

    # -- its end

    def exit(self, reason: str, *, explained_by: str = "") -> None:
        """Exit on its own. `explained_by` names the fault that justifies it."""
        self.log(f"ends: {reason}")
        self.world.counts["ranks that ended by themselves"] += 1
        self.site.checkers.ended(self, reason, explained_by)
        self.kill()

    def _die(self) -> None:
        """Drop the process group, so that the peers see its connections close, unless the host lost its power."""
        if not self.has_vanished:
            self._drop()
        self.site.rank_died(self)


def _as_refusal(error: Exception) -> LighthouseError:
    """Return the refusal that the client makes of a call without an answer."""
    return error if isinstance(error, LighthouseError) else DeadlinePassed(str(error))
