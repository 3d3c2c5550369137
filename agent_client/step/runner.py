"""The work of a rank in one step: request the quorum, connect to the peers, heal, reduce, vote.

`begin`, `reduce` and `reach_all` run on the background thread, in the order of their submission. `install` and `finish`
run on the script's thread: `install` after `begin`, and `finish` after everything else. The participants compare each
collective before they run it (rules/comparison.py).
"""

import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.peers import Peers
from agent_client.errors import AgentError, ModelMismatch, ScriptMismatch, first_line
from agent_client.healing.catch_up import CatchUpDriver
from agent_client.healing.connection import StateRefused
from agent_client.healing.healing import DoesNotFit, Healing
from agent_client.manager_client.client import ManagerConnection
from agent_client.progress.activity import Shape
from agent_client.progress.progress import Block, Progress
from agent_client.progress.rules import Entry
from agent_client.state.digest import PendingDigest
from agent_client.state.rules import MAX_DIVERGENCES, Digest, Divergences, common_interval, differs, outliers
from agent_client.step.config import AgentConfig
from agent_client.step.rules import comparison as agreement
from agent_client.step.rules.comparison import Announced, DataChoice, Flag, Kind, Row, announce_draw, standing_of
from agent_client.step.rules.machine import StepMachine
from agent_client.step.rules.news import Loss, Patience, StepNews
from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.membership import PLAIN, Assignment, DistrustKind, Tag
from lighthouse_protocol.messages.progress import HEAL
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.process.children import ServerProcess

log = logging.getLogger(__name__)


NAMES_LOGGED = 16


def log_quorum(before: Assignment | None, now: Assignment) -> None:
    """Log a new quorum with the groups that were admitted and lost. Do nothing if it is the quorum of `before`."""
    if before is not None and before.quorum_id == now.quorum_id:
        return
    known = frozenset(before.replica_ids if before is not None else now.replica_ids)
    admitted = [name for name in now.replica_ids if name not in known]
    gone = sorted(known - frozenset(now.replica_ids))
    log.info(
        "quorum %d: %d %s from step %d%s%s",
        now.quorum_id,
        now.replica_world_size,
        "group" if now.replica_world_size == 1 else "groups",
        now.max_step,
        f"; joined: {_named(admitted)}" if admitted else "",
        f"; without: {_named(gone)}" if gone else "",
    )


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMES_LOGGED
    return ", ".join(names[:NAMES_LOGGED]) + (f" and {more} more" if more > 0 else "")


REMEDY = (
    "run the same script with the same model and settings in all groups; if optimizers take turns, derive "
    "the turn from agent.quorum_step, not from a counter in the script"
)
BUFFERS = "the buffers of the model; broadcast_buffers=False leaves them out"
LIKELY_CAUSES = (
    "most likely a gradient that bypasses the Agent, a scheduler or GradScaler that is not registered, or "
    "parameters that the script changes depending on its rank, the time or its own random numbers"
)
PARTS_WITHIN_S = 2.0
RESTART = "restart the job from its last checkpoint"
SAMPLES_TOLD = 64
NAMED_WITHIN_S = 0.25
"""How long a discarded step waits for the name of a lost group. The lighthouse and the peers notice a loss at about the
same time."""


class Part(NamedTuple):
    """A reduction that will follow."""

    name: str
    elements: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StepDigest:
    """Digest of a part of the state named by `tag`."""

    tag: Tag
    digest: PendingDigest
    windows: int
    """Number of parts, which take turns."""


class StepRunner:
    """Runs the steps of one rank."""

    def __init__(
        self,
        machine: StepMachine,
        manager: ManagerConnection,
        peers: Peers,
        healing: Healing,
        group: GlooGroup | None,
        config: AgentConfig,
        manager_process: ServerProcess | None,
        catch_up: CatchUpDriver | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Connect the parts.

        Args:
            machine: Machine of the rank.
            manager: Connection to the manager.
            peers: Connection to the same rank of the other groups.
            healing: Transfers of state.
            group: Connects the ranks of this group, or None in a group of one.
            config: Options of the Agent.
            manager_process: The manager, if it is a child of this process.
            catch_up: Only with `heal_mode="catch_up"`.
            progress: Receives each wait and each collective.
        """
        self.machine = machine
        self.progress = progress or Progress()
        self.last: Assignment | None = None
        """Assignment of the last quorum."""
        self.compares_end = False
        """True in the first step under a quorum. The participants compare its end, too."""
        self._number = 0
        self._covered: deque[Part] = deque()
        """Reductions that were announced together with an earlier one and will follow."""
        self._may_cover = True
        """False once the script has reduced something between reductions that were announced together."""
        self._covers = False
        """True if all participants may announce reductions together."""
        self._mismatch: ScriptMismatch | None = None
        self.check_every = 0
        """Steps between two comparisons of the state under the present quorum."""
        self.digest: StepDigest | None = None
        """Digest of the state at the beginning of the step, if it is compared."""
        self.leaves_to_scaler: Callable[[], bool] = lambda: False
        """Returns whether a GradScaler skips steps whose gradients are not finite."""
        self.samples: Callable[[], torch.Tensor] | None = None
        """Returns the indices of this rank's last batch, if a StepSampler has drawn it."""
        self.nonfinite = ""
        """Describes the gradient that was not finite in this step, or empty."""
        self._checks_finite = False
        self.counts_at_once = True
        """True if a healing group counts in the same step."""
        self.data: DataChoice | None = None
        """Source of the last batch, if a sampler of ours has drawn it."""
        self._manager = manager
        self._peers = peers
        self._healing = healing
        self._group = group
        self._group_world_size = group.size if group is not None else 1
        self._config = config
        self._manager_process = manager_process
        self._catch_up = catch_up
        self._patience = Patience(config.max_consecutive_discards)
        self._noted = ""
        self._news = StepNews()
        self._divergences = Divergences()
        self._failed_at: float | None = None
        """When the current step failed."""

    def begin(self, asked_for: int) -> None:
        """Get the quorum, connect, serve the state and heal.

        Args:
            asked_for: Number of reductions that the script requested before this step.
        """
        machine = self.machine
        self.compares_end = False
        self._failed_at, self.nonfinite = None, ""
        with self.progress.asking("quorum"):
            assignment = self._ask_patiently()
        self._warn_for_group(self._news.late(time.monotonic()))
        if isinstance(assignment, LighthouseError):
            return machine.unanswered(str(assignment))
        machine.answered(assignment)
        self.progress.numbers.begin(assignment.quorum_id, asked_for)
        log_quorum(self.last, assignment)
        is_first = self.last is None or self.last.quorum_id != assignment.quorum_id
        self.check_every = 0 if is_first else self.check_every
        self._checks_finite = self._config.on_nonfinite != "commit" if is_first else self._checks_finite
        self.last, self._number = assignment, 0
        self._covered.clear()
        self.compares_end = is_first and self.compares
        self._patience.answered()
        if self._catch_up is not None:
            self._catch_up.answered(assignment)
            self._manager.asks_ahead = not assignment.catches_up
        why_revoked = functools.partial(self._why_revoked, assignment)
        if (reason := why_revoked()) is not None:
            return machine.failed(reason)
        if machine.cannot_heal and machine.distrust is not None:
            raise AgentError(f"{machine.distrust.text}; no other group has a state to heal from: {RESTART}")
        if machine.is_unhealed and machine.distrust is not None:
            # The other ranks of the group are in this step already, so finish it and vote no.
            machine.failed(machine.distrust.text)
            self._peers.drop()
            self._healing.withdraw()
            return None
        with self.progress.asking("peers"):
            self._guarded("making the process group", lambda: self._peers.configure(assignment, why_revoked))
            if self.compares and machine.failure is None:
                self._guarded("comparing", lambda: self._agree() if is_first else self._compare_state(assignment))
        if assignment.has_healing and not assignment.heals and machine.failure is None:
            healing = [assignment.replica_ids[place] for place in assignment.healing]
            self._log_for_group(self._news.waits(assignment.max_step, healing, time.monotonic()))
        self._guarded("serving the state", lambda: self._healing.serve(assignment, machine))
        if not assignment.catches_up:
            self._heal(assignment)
        return None

    def _agree(self) -> None:
        """Agree on options in the first step under a quorum.

        These are the interval of comparisons, the check for finite gradients, and whether collectives are announced
        together. A group with another option must neither leave out a collective nor apply a step that the others
        discard.
        """
        payload = (self._config.check_state_every, self._checks_finite, self._may_cover)
        rows = self.agree(Announced(Kind.OPTIONS), payload=payload)
        if rows is None:
            return
        told = [row.payload[0] for row in rows]
        self.check_every = common_interval(told)
        self._checks_finite = any(row.payload[1] for row in rows)
        self._covers = all(row.payload[2] for row in rows)
        if len(set(told)) > 1:
            log.warning("check_state_every differs between the groups (%s): using %d", told, self.check_every)

    def _compare_state(self, assignment: Assignment) -> None:
        """Compare the state, in the same steps at all participants."""
        if not self.check_every or assignment.max_step % self.check_every:
            return
        digest, self.digest = self.digest, None
        is_up_to_date = not (self.machine.must_install or assignment.catches_up)
        own = digest.digest.read() if is_up_to_date and digest and digest.tag == self.machine.tag else None
        wrong = outliers(self._exchange_digests(Kind.STATE, own))
        if digest is not None and own is not None:
            names = [assignment.replica_ids[place] for place in wrong]
            times = self._divergences.compared(names, digest.windows)
            if wrong:
                self._differ(assignment, wrong, times)

    def _exchange_digests(self, kind: Kind, own: Digest | None) -> list[Digest | None]:
        """Exchange digests.

        Returns:
            The digests by replica_rank, with None for a participant that is not judged.

        Raises:
            RuntimeError: The step has failed.
        """
        rows = self.agree(self._announced(kind), payload=(own is not None, *(own or (0, 0))))
        if rows is None:
            raise RuntimeError(self.machine.failure or "the digests were not compared")
        return [(first, second) if is_told else None for is_told, first, second in (row.payload for row in rows)]

    def _differ(self, assignment: Assignment, wrong: Sequence[int], times: int) -> None:
        """Discard the step, whose gradients belong to different states.

        Args:
            assignment: The quorum.
            wrong: Replica ranks of the minority, which no longer hold a state.
            times: How often they have differed. They have healed after each time but the last.
        """
        machine, names = self.machine, assignment.replica_ids
        others = ", ".join(name for place, name in enumerate(names) if place not in wrong)
        again = f", again after it has healed ({times} of {MAX_DIVERGENCES})" if times > 1 else ""
        who = ", ".join(names[place] for place in wrong)
        text = f"the state of step {machine.step} in {who} differs from {others}{again}"
        log.error("%s%s", text, again and f": the script is the cause; {LIKELY_CAUSES}")
        if assignment.replica_rank in wrong:
            text = f"rank {self._manager.group_rank}: the state of step {machine.step} differs from that of {others}"
            machine.tear(DistrustKind.DIVERGENCE, text + again)
            if times >= MAX_DIVERGENCES:
                self._mismatch = ScriptMismatch(f"{text}{again}: the script is the cause; {LIKELY_CAUSES}")
                self._manager.report(f"ScriptMismatch: {text}{again}", ends_group=True)
        else:
            machine.failed(text)

    @property
    def compares_gradients(self) -> bool:
        """True if a participant catches up, which must apply the same gradients as the others."""
        assignment, machine = self.machine.assignment, self.machine
        if assignment is None or not assignment.compares or machine.failure is not None or not self.check_every:
            return False
        return bool(assignment.catching_up)

    def compare_gradients(self, digest: PendingDigest) -> str:
        """Return why this rank must not apply its gradients to catch up, or an empty text."""
        assignment, reasons = self.machine.assignment, list[str]()
        assert assignment is not None

        def compare() -> None:
            own = digest.read()
            contributors = self._exchange_digests(Kind.GRADIENTS, own if self.machine.contributes else None)
            if assignment.catches_up and differs(own, contributors):
                reasons.append(f"step {self.machine.step}: its gradients differ from those of the other groups")

        self._guarded("comparing gradients", compare)
        return "".join(reasons)

    def _heal(self, assignment: Assignment) -> None:
        """Receive a peer's state.

        Raises:
            AgentError: The state does not fit. Another peer's would not fit either.
        """
        machine = self.machine
        if machine.must_install and not machine.heals_first:
            log.warning(
                "step %d has begun with another state than the peers have; healing before the next", machine.step
            )
            if assignment.place is not None:
                self._guarded("healing", _refuse_to_count)
            return
        with self.progress.busy(HEAL) if assignment.heals else nullcontext():
            self._guarded("healing", lambda: self._healing.fetch(assignment))

    def _ask_patiently(self) -> Assignment | LighthouseError:
        """Request the quorum, and retry while the manager is unreachable.

        The other ranks of the group may wait for this request.

        Returns:
            The assignment, or the error of a manager that answers without a quorum. Then the next step repeats the
            request.
        """
        while True:
            try:
                return self._ask_manager()
            except LighthouseError as e:
                patience = self._patience
                if reason := patience.refused(e, time.monotonic()):
                    raise AgentError(f"the manager at {self._manager.address} rejected this rank: {reason}") from e
                is_alive = self._check_manager(e)
                if news := patience.take_news(e, time.monotonic()):
                    log.error("step %d: %s", self.machine.step, news)
                time.sleep(patience.backoff_s)
                if is_alive:
                    return e

    def _ask_manager(self) -> Assignment:
        """Request a quorum for this step.

        If the quorum is revoked before its use, and no other rank of the group can have begun the step, give it up with
        a no.
        """
        machine = self.machine
        while True:
            assignment = self._manager.ask(
                machine.step,
                self._healing.address,
                timeout_s=self._config.quorum_timeout_s,
                tag_quorum_id=machine.tag_quorum_id,
                commit_failures=machine.discards,
                catch_up=self._catch_up.request_fields() if self._catch_up is not None else PLAIN,
                distrust=machine.distrust,
                heals_first=machine.heals_first if self.counts_at_once else None,
            )
            if self._group_world_size > 1 or self._why_revoked(assignment) is None:
                return assignment
            step, quorum_id = assignment.max_step, assignment.quorum_id
            self._manager.vote(step, False, quorum_id=quorum_id, timeout_s=self._config.timeout_s)
            machine.passed_over()

    def _why_revoked(self, assignment: Assignment) -> str | None:
        reason = self._manager.revoked(assignment.quorum_id)
        if reason is None and assignment.revoked:
            reason = "told with the answer"
        return None if reason is None else f"quorum {assignment.quorum_id} was revoked: {reason}"

    def _check_manager(self, error: LighthouseError) -> bool:
        """Check whether the manager answers, so that only the quorum is missing.

        Raises:
            AgentError: The manager is lost permanently.
        """
        if self._manager_process is not None and not self._manager_process.is_alive:
            raise AgentError("the group's manager ended; restart the group") from error
        return self._manager.check_alive(error)

    def reduce(
        self, tensor: torch.Tensor, within_group: bool, entry: Entry, name: str, rest: Sequence[Part] = ()
    ) -> torch.Tensor:
        """Average `tensor` in place.

        The sum inside the group is computed even after a failure, because the other ranks wait in it.

        Args:
            tensor: Tensor of this rank.
            within_group: Whether to sum inside the group first.
            entry: Number of the collective.
            name: Part of the script.
            rest: Reductions that certainly follow this one with nothing in between. They are announced with it.
        """
        group, divides_first = self._group, _is_half(tensor.dtype)
        summed = tensor.to(self._summed_as(tensor.dtype))
        if group is not None and within_group:
            if divides_first:
                summed /= self._group_world_size
            with self.inside(entry, "all_reduce", tensor.shape, within_group=True):
                self._guarded("reducing inside the group", lambda: group.all_reduce(summed, self._limit_s()))
            if not divides_first:
                summed /= self._group_world_size
        flags = self._flags(summed)
        if not self.machine.contributes or self.machine.passes_over:
            summed.zero_()
        self._reduce_over_peers(summed, entry, name, flags, rest, divides_first=divides_first)
        return tensor if summed is tensor else tensor.copy_(summed)

    def _summed_as(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if _is_half(dtype) and self._config.reduce_dtype == "float32" else dtype

    def _flags(self, tensor: torch.Tensor) -> Flag:
        if not self.machine.contributes:
            return Flag.NONE
        if self.machine.passes_over:
            return Flag.PASSES_OVER
        return Flag.NONE if not self._checks_finite or is_finite(tensor) else Flag.NOT_FINITE

    def take_from_first(self, packed: torch.Tensor, entry: Entry) -> torch.Tensor:
        """Receive the bytes of the first participant that counts, in place.

        Byte 0 is 1 at that participant, and so it must be 1 in the sum.
        """
        machine = self.machine
        if not (machine.contributes and machine.share.is_first):
            packed.zero_()
        self._reduce_over_peers(packed, entry, BUFFERS, is_mean=False)
        if machine.failure is None and int(packed[0]) != 1:
            machine.failed(f"{int(packed[0])} participants spoke as the first")
        return packed

    def sum_over_group(self, tensor: torch.Tensor, entry: Entry) -> None:
        """Sum the tensor over the ranks of the group, in place.

        Raises:
            RuntimeError: A rank is lost.
        """
        if self._group is not None:
            with self.inside(entry, "all_reduce", tensor.shape, within_group=True):
                self._group.all_reduce(tensor)

    def inside(self, entry: Entry, operation: str, shape: Shape = "", *, within_group: bool) -> Block:
        quorum_id, number, inner = self.progress.numbers.told(entry, within_group=within_group)
        return self.progress.collective(quorum_id, number, operation, shape, within_group=within_group, inner=inner)

    @property
    def compares(self) -> bool:
        """True if the last quorum has several participants and all of them are Agents, which compare collectives."""
        return self.last is not None and self.last.compares and self.last.replica_world_size > 1

    def _reduce_over_peers(
        self,
        tensor: torch.Tensor,
        entry: Entry,
        name: str = "",
        flags: Flag = Flag.NONE,
        rest: Sequence[Part] = (),
        *,
        is_mean: bool = True,
        divides_first: bool = False,
    ) -> None:
        machine = self.machine
        if machine.assignment is None or machine.failure is not None:
            return
        if divides_first:
            tensor /= self.machine.share.divisor
        with self.inside(entry, "all_reduce", tensor.shape, within_group=False):
            self._number += 1
            is_covered = self._takes_covered(tensor, name)
            if not is_covered and not self._agree_on(tensor, name, flags, rest):
                return
            if not self._guarded("reducing", lambda: self._peers.all_reduce(tensor, self._limit_s())):
                return
            if is_covered and self._checks_finite and not is_finite(tensor):
                self._covered.clear()  # all receive the same sum, so all now compare whose gradient it was
                if not self._agree_on(tensor, name, flags) or not self._reject("the mean", name, ()):
                    return
        machine.reduced()
        if is_mean:
            if not divides_first:
                tensor /= max(1, machine.divisor)
            elif machine.divisor != machine.share.divisor:  # peers have announced skipped batches since
                tensor *= machine.share.divisor / max(1, machine.divisor)
            if self._checks_finite and not self.compares and not is_finite(tensor):
                self._reject("the mean", name, ())  # without a comparison the group is unknown

    def _takes_covered(self, tensor: torch.Tensor, name: str) -> bool:
        """Return whether this reduction was announced with an earlier one."""
        if not self._covered or self._covered[0] != Part(name, tensor.numel(), tensor.dtype):
            return False
        self._covered.popleft()
        return True

    def _agree_on(self, tensor: torch.Tensor, name: str, flags: Flag, rest: Sequence[Part] = ()) -> bool:
        """Announce a reduction. Return whether all participants reduce the same and the sum is useful."""
        machine, assignment = self.machine, self.machine.assignment
        assert assignment is not None
        flagged = {assignment.replica_ids[assignment.replica_rank]: (flags, machine.share.weight)}
        if self.compares:
            covered = [part._replace(dtype=self._summed_as(part.dtype)) for part in rest if self._covers]
            told = name + "".join(f", then {part.elements} of {_name_of(part.dtype)}" for part in covered)
            announced = self._announced(Kind.REDUCE, tensor.numel() * tensor.itemsize, _name_of(tensor.dtype), told)
            rows = self.agree(announced, flags=flags, payload=(machine.share.weight,))
            if rows is None:
                return False
            self._covered.extend(covered)
            flagged = {
                replica_id: (row.flags, row.payload[0])
                for replica_id, row in zip(assignment.replica_ids, rows, strict=True)
            }
        if any(told is not Flag.NONE for told, _ in flagged.values()):
            passed = sum(weight for told, weight in flagged.values() if told & Flag.PASSES_OVER)
            machine.passed_weight = max(machine.passed_weight, passed)
            if wrong := [replica_id for replica_id, (told, _) in flagged.items() if told & Flag.NOT_FINITE]:
                return self._reject(f"the gradient of {' and '.join(wrong)}", name, wrong)
        return True

    def _reject(self, what: str, name: str, wrong: Sequence[str]) -> bool:
        """Discard the step because of gradients that are not finite.

        Each group in `wrong` reports it. If none is known, the first group does.

        Returns:
            True if the step is not discarded, because a GradScaler will skip it.
        """
        if self.leaves_to_scaler():
            return True
        assignment = self.machine.assignment
        assert assignment is not None
        me = assignment.replica_ids[assignment.replica_rank]
        self.nonfinite = f"{what} is not finite" + (f" ({name})" if name else "") + self.samples_text()
        if me in (wrong or assignment.replica_ids[:1]):
            self.progress.own.reject(assignment.max_step, cut_reason(self.nonfinite), is_own=bool(wrong))
        self.machine.erred(self.nonfinite)
        return False

    def samples_text(self) -> str:
        """Return the samples of the last batch, for a log."""
        if self.samples is None:
            return ""
        told = self.samples().tolist()
        more = f" and {len(told) - SAMPLES_TOLD} more" if len(told) > SAMPLES_TOLD else ""
        return f"; samples here: {', '.join(map(str, told[:SAMPLES_TOLD]))}{more}"

    def _announced(self, kind: Kind, size: int = 0, dtype: str = "", name: str = "") -> Announced:
        assignment = self.machine.assignment
        return Announced(kind, self._number, size, dtype, name, assignment.max_step if assignment else 0)

    def agree(
        self,
        announced: Announced,
        within_s: float | None = None,
        *,
        flags: Flag = Flag.NONE,
        payload: Sequence[int] = (),
    ) -> list[Row] | None:
        """Exchange announcements with all participants.

        Args:
            announced: Announcement of this rank.
            within_s: Time limit. Default: that of a collective.
            flags: Flags of this rank's tensor.
            payload: Further numbers, up to PAYLOAD_WORDS.

        Returns:
            The rows by replica_rank, or None if they do not match. The step has then failed at all participants.
        """
        assignment, limit_s = self.machine.assignment, self._limit_s() if within_s is None else within_s
        assert assignment is not None
        if self._covered:
            self._may_cover = False
            self._guarded("comparing", _refuse_to_mix)
            return None
        said: list[tuple[int, ...]] = []
        heals = assignment.heals or assignment.catches_up
        commits = self.machine.commits
        standing = standing_of(heals=heals, max_step=assignment.max_step, has_trained=commits > 0)
        words = agreement.to_words(announced, standing, commits, flags, payload)
        if not self._guarded("comparing", lambda: said.extend(self._peers.exchange(words, limit_s))):
            return None
        rows = [agreement.from_words(each) for each in said]
        if faulty := agreement.find_faulty(rows):
            place = assignment.replica_rank
            text = agreement.explain(rows, faulty, assignment.replica_ids, place)
            self._disagree(f"step {assignment.max_step}: {text}", is_ours=place in faulty)
            return None
        return rows

    def _disagree(self, what: str, *, is_ours: bool) -> None:
        """End the group at fault, since a retry would not help. The others continue without it."""
        log.error("%s", what)
        with suppress(RuntimeError):  # barrier: all have received all announcements
            self._peers.exchange((0,), PARTS_WITHIN_S)
        if is_ours:
            self._mismatch = ScriptMismatch(f"{what}: {REMEDY}")
        self.machine.failed(what, is_blamed=not is_ours)
        self._peers.drop()
        if is_ours:
            self._manager.report(f"ScriptMismatch: {what}", ends_group=True)

    def _limit_s(self) -> float:
        """Return the time limit of a collective or a vote. If a group heals, the others wait for it."""
        assignment = self.machine.assignment
        heals = assignment is not None and assignment.has_healing
        return self._config.timeout_s + (self._config.heal_timeout_s if heals else 0.0)

    def reach_all(self) -> None:
        """Check that every participant is in the step, if nothing was reduced.

        In the first step under a quorum, also check that no participant reduces anything more. In later steps its next
        announcement shows that.
        """
        if self.compares_end:
            self._end_comparing()
        elif not self.machine.has_reduced:
            self._reduce_over_peers(torch.zeros(1), self.progress.numbers.over())

    def _end_comparing(self) -> None:
        if self.machine.failure is not None:
            return self._peers.drop()  # the others wait in an exchange
        entry = self.progress.numbers.over()
        with self.inside(entry, "all_reduce", within_group=False):
            is_same = self.agree(self._announced(Kind.END)) is not None
            if is_same and self.agree(announce_draw(self.data)) is not None:
                self.machine.reduced()
        return None

    def _guarded(self, what: str, act: Callable[[], object]) -> bool:
        """Call `act`. If it fails, mark the step as failed, and end it for the peers too.

        Returns:
            True if `act` succeeded.

        Raises:
            ModelMismatch, AgentError: No later quorum can repair the failure. The manager receives a report before the
                peers notice.
        """
        try:
            act()
        except DoesNotFit as e:
            mismatch = ModelMismatch(
                f"the received state does not match the local one: {e.difference or first_line(e)}; this group's model "
                "or optimizer is not its peers': start it with theirs"
            )
            self._manager.report(f"ModelMismatch: {mismatch}", ends_group=True)
            raise mismatch from None
        except StateRefused as e:
            refused = AgentError(f"this group cannot heal: {e}")
            self._manager.report(f"{refused}", ends_group=True)
            raise refused from None
        except Exception as e:  # noqa: BLE001  the next quorum repairs any failure
            log.debug("step %d: %s failed: %s", self.machine.step, what, first_line(e))
            self._failed_at = time.monotonic() if self._failed_at is None else self._failed_at
            self.machine.failed(f"{what}: {first_line(e)}")
            self._peers.drop()
            return False
        return True

    # -- on the script's thread

    def finish(self) -> bool:
        """Vote and return the decision.

        Raises:
            AgentError: This rank cannot continue.
        """
        self._covered.clear()
        if self._mismatch is not None:
            raise self._mismatch
        machine = self.machine
        commit = self._vote()
        self._healing.release(is_committed=commit)
        failure = machine.failure
        machine.decided(commit)
        self.compares_end = False
        if machine.is_installing:
            raise AgentError(f"a peer's state was installed only partly: {failure}; restart the group")
        if not commit:
            self._note_discard(failure or "another rank of the group voted no")
            if self.nonfinite and self._config.on_nonfinite == "raise":
                raise AgentError(f"step {machine.step}: {self.nonfinite} (on_nonfinite is 'raise')")
        elif machine.assignment is not None:
            step, participants = machine.assignment.max_step, machine.assignment.replica_ids
            for line in self._news.committed(step, participants, time.monotonic()):
                self._log_for_group(line)
        return commit

    def install(self) -> bool:
        """Install the state that `begin` has received. Return whether there was one.

        Raises:
            AgentError: The state is only partly installed.
        """
        machine = self.machine
        assignment = machine.assignment
        if assignment is None or machine.failure is not None or not machine.must_install:
            return False
        self._guarded("installing a peer's state", lambda: self._healing.install(machine))
        if machine.is_installing:
            raise AgentError(f"a peer's state was installed only partly: {machine.failure}; restart the group")
        return not machine.must_install

    def _vote(self) -> bool:
        """Return the decision.

        A rank that voted yes cannot continue without it, since the others may have committed. The vote of a rank that
        is alone in its group is the decision.
        """
        vote, machine = self.machine.vote(), self.machine
        step = machine.assignment.max_step if machine.assignment else machine.step
        quorum_id = machine.assignment.quorum_id if machine.assignment else None
        if machine.has_decided:
            self._manager.tell(step, quorum_id=quorum_id, timeout_s=self._limit_s())
            return True
        try:
            with self.progress.waiting_for("vote"):
                return self._manager.vote(step, vote, quorum_id=quorum_id, timeout_s=self._limit_s())
        except LighthouseError as e:
            if not vote:
                return False
            raise AgentError(f"voted yes for step {step} but cannot learn the decision: {e}; restart the group") from e

    def _note_discard(self, reason: str) -> None:
        machine, assignment = self.machine, self.machine.assignment
        lost = self._why_lost(assignment) if assignment is not None else None
        if lost is not None:
            failed_at = time.monotonic() if self._failed_at is None else self._failed_at
            return self._warn_for_group(self._news.lost(Loss(*lost, machine.step, failed_at)))
        self._warn_for_group(self._news.flush())
        text = f"step {machine.step} discarded: {reason}"
        # Without a quorum the step is repeated at once, and Patience logs regularly what it waits for.
        is_news = assignment is not None or text != self._noted
        log.log(logging.WARNING if is_news else logging.DEBUG, "%s", text)
        self._noted = text
        if assignment is None or machine.is_blamed:
            return None
        if self._waits_for_healing(assignment) and not machine.has_erred:
            return None
        machine.faulted()
        if machine.faults >= self._config.max_consecutive_discards:
            names = ", ".join(assignment.replica_ids)
            raise AgentError(
                f"{machine.faults} steps discarded in a row (max_consecutive_discards): {reason}; quorum of {names}"
            )
        return None

    def _log_for_group(self, line: str) -> None:
        """Log a line that is true for the whole group, at one of its ranks."""
        log.log(logging.INFO if self._manager.group_rank == 0 else logging.DEBUG, "%s", line)

    def _warn_for_group(self, line: str) -> None:
        """Log such a line as a warning, unless it is empty."""
        if line:
            log.log(logging.WARNING if self._manager.group_rank == 0 else logging.DEBUG, "%s", line)

    def _why_lost(self, assignment: Assignment) -> tuple[str, str] | None:
        """Return the other group whose loss has discarded the step, and the reason, or None if none is known."""
        if self.machine.has_erred or assignment.replica_world_size == 1:
            return None
        told = self._manager.why_lost(assignment.quorum_id, NAMED_WITHIN_S)
        if told is None or told.lost == assignment.replica_ids[assignment.replica_rank]:
            return None
        return told.lost, told.reason.removeprefix(f"{told.lost}: ")

    def _waits_for_healing(self, assignment: Assignment) -> bool:
        """Check whether this group only waits for others that heal, so that the failure was in their transfer."""
        return assignment.has_healing and assignment.replica_rank not in assignment.healing


def is_finite(tensor: torch.Tensor) -> bool:
    """Check that no element is infinite or NaN. One sum decides it, unless finite numbers overflow."""
    values = tensor._values() if tensor.is_sparse else tensor
    if not (values.is_floating_point() or values.is_complex()):
        return True
    is_half = values.is_floating_point() and values.itemsize < torch.float32.itemsize
    total = values.sum(dtype=torch.float32 if is_half else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())  # a sum of large numbers may overflow


def _refuse_to_count() -> None:
    raise RuntimeError("the peers count on this group's gradients, which were computed from another state")


def _refuse_to_mix() -> None:
    raise RuntimeError("the script reduces something else between the buckets of a backward pass")


def _is_half(dtype: torch.dtype) -> bool:
    """Check for a dtype whose sum may overflow where its mean does not. Such tensors are divided before the sum."""
    return dtype in (torch.float16, torch.bfloat16)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


T = TypeVar("T")


class BackgroundThread:
    """Runs tasks in order on a daemon thread, which does not keep the interpreter from exiting."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()
        with self._lock:
            self._unfinished += 1
        self._tasks.put((task, done))
        return done

    @property
    def is_idle(self) -> bool:
        """True if all tasks are done. A task is done before its future is."""
        return self._unfinished == 0

    def close(self, timeout_s: float) -> None:
        """End after the submitted tasks. Wait up to `timeout_s` for that."""
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, done = entry
            settle: Callable[[Any], None]
            try:
                settle, outcome = done.set_result, task()
            except BaseException as e:  # noqa: BLE001  the caller receives it with the result
                settle, outcome = done.set_exception, e
            with self._lock:
                self._unfinished -= 1
            settle(outcome)
            del entry, task, done, settle, outcome
