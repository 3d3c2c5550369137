"""Checks that the participants of a quorum run the same collectives and hold the same state (rules/comparison.py).

`Comparison` exchanges announcements of the next collectives, options and digests with the other participants. All
buckets of a backward pass are announced together with the first bucket, so the others need no exchange. `StepAttempt`
runs the operations of a step that may fail, including these exchanges.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from agent_client.collectives.peers import Peers
from agent_client.errors import AgentError, ModelMismatch, ScriptMismatch, first_line
from agent_client.healing.connection import StateRefused
from agent_client.manager_client.client import ManagerConnection
from agent_client.progress.progress import Progress
from agent_client.state.digest import PendingDigest
from agent_client.state.snapshot import DoesNotFit
from agent_client.step.config import AgentConfig
from agent_client.step.rules.comparison import (
    MAX_DIVERGENCES,
    Announced,
    DataChoice,
    Digest,
    Divergences,
    Flag,
    Kind,
    Row,
    announce_draw,
    common_interval,
    differs,
    explain,
    find_faulty,
    from_words,
    outliers,
    standing_of,
    to_words,
)
from agent_client.step.rules.machine import StepMachine
from agent_client.step.rules.world_size import SHARE_AGAIN, SHARE_EVERY, decide_shares
from lighthouse_protocol.messages.membership import Assignment, DistrustKind, Tag
from lighthouse_protocol.messages.progress import ComputeTotals, StateDigest

log = logging.getLogger(__name__)

REMEDY = (
    "run the same script with the same model and settings in all groups; if optimizers take turns, derive "
    "the turn from agent.quorum_step, not from a counter in the script"
)
LIKELY_CAUSES = (
    "most likely a gradient that bypasses the Agent, a scheduler or GradScaler that is not registered, or "
    "parameters that the script changes depending on its rank, the time or its own random numbers"
)
BARRIER_TIMEOUT_S = 2.0
NO_TOTALS = ComputeTotals()


class Part(NamedTuple):
    name: str
    elements: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StepDigest:
    """Digest of one window (a part of all tensors). `tag` identifies the state."""

    tag: Tag
    digest: PendingDigest
    windows: int
    """Number of windows in the state. Each comparison covers the next window."""


@dataclass(eq=False)
class StepAttempt:
    """Runs the operations of the current step that may fail. After the first failure, the step counts as failed."""

    machine: StepMachine
    manager: ManagerConnection
    peers: Peers
    config: AgentConfig
    failed_at: float | None = None

    def run(self, what: str, act: Callable[[], object]) -> bool:
        """Call `act` and return True. If `act` fails, fail the step on this rank and its peers, and return False.

        `what` names the operation in the log.

        Raises:
            ModelMismatch, AgentError: A retry under another quorum would also fail. The manager is notified before the
                connections to the peers are closed.
        """
        try:
            act()
        except DoesNotFit as e:
            mismatch = ModelMismatch(
                f"the received state does not match the local one: {e.difference or first_line(e)}; this group's model "
                "or optimizer is not its peers': start it with theirs"
            )
            self.manager.report(f"ModelMismatch: {mismatch}", ends_group=True)
            raise mismatch from None
        except StateRefused as e:
            refused = AgentError(f"this group cannot heal: {e}")
            self.manager.report(f"{refused}", ends_group=True)
            raise refused from None
        except Exception as e:  # noqa: BLE001  the step is retried under the next quorum
            self.fail(what, first_line(e))
            return False
        return True

    def fail(self, what: str, reason: str) -> None:
        log.debug("step %d: %s failed: %s", self.machine.step, what, reason)
        self.failed_at = time.monotonic() if self.failed_at is None else self.failed_at
        self.machine.fail_step(f"{what}: {reason}")
        self.peers.drop()

    @property
    def limit_s(self) -> float:
        """Time limit for a collective or a vote in seconds. Includes `heal_timeout_s` if a participant is healing."""
        assignment = self.machine.assignment
        heals = assignment is not None and assignment.has_healing
        return self.config.timeout_s + (self.config.heal_timeout_s if heals else 0.0)


@dataclass(eq=False)
class Comparison:
    machine: StepMachine
    manager: ManagerConnection
    peers: Peers
    attempt: StepAttempt
    config: AgentConfig
    progress: Progress

    def __post_init__(self) -> None:
        self.is_on = False
        """True if the last quorum has several participants, all with an Agent that compares collectives."""
        self.compares_end = False
        """True in the first step under a quorum, in which the participants also compare the end of the step."""
        self.check_every = 0
        """Number of steps between two comparisons of the state under the current quorum, or 0 for none."""
        self.checks_finite = False
        """True if the participants discard steps with gradients that are not finite."""
        self.digest: StepDigest | None = None
        """Digest of the state at the beginning of the step, or None if the state is not compared in this step."""
        self.data: DataChoice | None = None
        """Source of the last batch, or None if neither StepSampler nor StepLoader has drawn it."""
        self.mismatch: ScriptMismatch | None = None
        """Error to raise at the next vote of this rank, or None."""
        self._collectives = 0
        self.ahead: deque[Part] = deque()
        """Reductions that were announced but have not run yet. They must run before any other exchange."""
        self._may_announce_ahead = True
        """False once the script has reduced something else before all reductions in `ahead` had run."""
        self._announces_ahead = False
        """True if `_may_announce_ahead` is true at all participants."""
        self._divergences = Divergences()
        self.shares_due = 0
        """Step in which the speeds are exchanged again. It is the same at all participants."""
        self._measured = NO_TOTALS
        """Compute time and number of microbatches at the last exchange of speeds."""
        self._microbatch_us = 0
        """Last measured mean time per microbatch in microseconds, or 0 if unknown."""

    def begin_step(self, assignment: Assignment, *, is_first: bool) -> None:
        self.is_on = assignment.compares and assignment.replica_world_size > 1
        if is_first:
            self.check_every, self.checks_finite = 0, self.config.on_nonfinite != "commit"
        self.compares_end = is_first and self.is_on
        self._collectives = 0
        self.ahead.clear()

    def end_step(self) -> None:
        self.compares_end = False
        self.ahead.clear()

    def agree_on_options(self) -> None:
        """Exchange options with the other participants in a quorum's first step, and use a value that suits all.

        Groups with different options would run different collectives, or one would apply a step that another discards.
        """
        payload = (self.config.check_state_every, self.checks_finite, self._may_announce_ahead)
        rows = self.exchange(Announced(Kind.OPTIONS), payload=payload)
        if rows is None:
            return
        intervals = [row.payload[0] for row in rows]
        self.check_every = common_interval(intervals)
        self.checks_finite = any(row.payload[1] for row in rows)
        self._announces_ahead = all(row.payload[2] for row in rows)
        if len(set(intervals)) > 1:
            log.warning("check_state_every differs between the groups (%s): using %d", intervals, self.check_every)

    def agree_on_shares(self, assignment: Assignment) -> None:
        """Divide the step's microbatches among the contributors according to their speeds."""
        machine, totals = self.machine, self.progress.compute.totals or NO_TOTALS
        if microbatches := totals.microbatches - self._measured.microbatches:
            self._microbatch_us = max(1, round(1e6 * (totals.seconds - self._measured.seconds) / microbatches))
        self._measured = totals
        place = 0 if assignment.place is None else assignment.place + 1
        rows = self.exchange(self._announcement(Kind.SPEEDS), payload=(place, self._microbatch_us))
        if rows is None:
            return
        times_us = [time_us for place, time_us, *_ in sorted(row.payload for row in rows) if place]
        before = machine.shares
        machine.set_shares(decide_shares(before, times_us, machine.world_size.size))
        self.shares_due = assignment.max_step + (SHARE_EVERY if all(times_us) else SHARE_AGAIN)
        if machine.shares != before:
            log.info("microbatches of a step, by group: %s", ", ".join(map(str, machine.shares)))

    # -- digests of state and gradients

    def compare_state(self, assignment: Assignment) -> None:
        """In every `check_every`-th step of the job, compare the participants' states. Fail the step if they differ."""
        if not self.check_every or assignment.max_step % self.check_every:
            return
        digest, self.digest = self.digest, None
        is_up_to_date = not (self.machine.must_install or assignment.catches_up)
        own = digest.digest.read() if is_up_to_date and digest and digest.tag == self.machine.tag else None
        state = None
        if own is not None:
            digest_text = "".join(f"{part % 2**64:016x}" for part in own)
            self.progress.trace_state(assignment.max_step, assignment.quorum_id, digest_text)
            state = StateDigest(assignment.max_step, assignment.quorum_id, digest_text)
        wrong = outliers(self._exchange_digests(Kind.STATE, own))
        self.progress.compared = state or self.progress.compared
        if digest is not None and own is not None:
            names = [assignment.replica_ids[place] for place in wrong]
            times = self._divergences.compared(names, digest.windows)
            if wrong:
                self._reject_state(assignment, wrong, times)

    def _exchange_digests(self, kind: Kind, own: Digest | None) -> list[Digest | None]:
        """Exchange digests. Return those of all participants by replica_rank. Raise RuntimeError if the step fails.

        A digest (also `own`) is None if the participant's values are not compared.
        """
        rows = self.exchange(self._announcement(kind), payload=(own is not None, *(own or (0, 0))))
        if rows is None:
            raise RuntimeError(self.machine.failure or "the digests were not compared")
        return [(first, second) if is_judged else None for is_judged, first, second in (row.payload for row in rows)]

    def _reject_state(self, assignment: Assignment, wrong: Sequence[int], times: int) -> None:
        """Discard the step, because the participants computed their gradients with different states.

        `wrong` contains the replica ranks of the minority. Their states become invalid, so they must heal, or exit once
        `times` reaches MAX_DIVERGENCES. `times` is how often one of them has differed, including now.
        """
        machine, names = self.machine, assignment.replica_ids
        others = ", ".join(name for place, name in enumerate(names) if place not in wrong)
        again = f", again after it has healed ({times} of {MAX_DIVERGENCES})" if times > 1 else ""
        minority = ", ".join(names[place] for place in wrong)
        text = f"the state of step {machine.step} in {minority} differs from {others}{again}"
        log.error("%s%s", text, again and f": the script is the cause; {LIKELY_CAUSES}")
        if assignment.replica_rank in wrong:
            text = f"rank {self.manager.group_rank}: the state of step {machine.step} differs from that of {others}"
            machine.tear(DistrustKind.DIVERGENCE, text + again)
            if times >= MAX_DIVERGENCES:
                self.mismatch = ScriptMismatch(f"{text}{again}: the script is the cause; {LIKELY_CAUSES}")
                self.manager.report(f"ScriptMismatch: {text}{again}", ends_group=True)
        else:
            machine.fail_step(text)

    @property
    def should_compare_gradients(self) -> bool:
        """True if the gradients must be compared, because a participant that is catching up will apply them later."""
        assignment, machine = self.machine.assignment, self.machine
        if assignment is None or not assignment.compares or machine.failure is not None or not self.check_every:
            return False
        return bool(assignment.catching_up)

    def compare_gradients(self, digest: PendingDigest) -> str:
        """Compare the averaged gradients. Return "", or why this rank must not apply its own when it catches up."""
        assignment, reasons = self.machine.assignment, list[str]()
        assert assignment is not None

        def compare() -> None:
            own = digest.read()
            contributors = self._exchange_digests(Kind.GRADIENTS, own if self.machine.contributes else None)
            if assignment.catches_up and differs(own, contributors):
                reasons.append(f"step {self.machine.step}: its gradients differ from those of the other groups")

        self.attempt.run("comparing gradients", compare)
        return "".join(reasons)

    # -- announcements

    def is_next_announced(self, tensor: torch.Tensor, name: str) -> bool:
        """Count the next reduction. Return whether it has already been announced together with an earlier one."""
        self._collectives += 1
        if not self.ahead or self.ahead[0] != Part(name, tensor.numel(), tensor.dtype):
            return False
        self.ahead.popleft()
        return True

    def announce_reduction(
        self, tensor: torch.Tensor, name: str, flags: Flag, following: Sequence[Part] = ()
    ) -> list[str] | None:
        """Announce a reduction with `flags`, and the reductions `following` that are certain to come directly after it.

        Return the replica ids of the groups whose tensor is not finite, or None if the exchange has failed the step.
        """
        machine, assignment = self.machine, self.machine.assignment
        assert assignment is not None
        weight = machine.share.weight
        flagged = {assignment.replica_ids[assignment.replica_rank]: (flags, weight)}
        if self.is_on:
            following = following if self._announces_ahead else ()
            reduce_dtype = self.config.reduce_dtype
            ahead = [part._replace(dtype=dtype_of_sum(part.dtype, reduce_dtype)) for part in following]
            names = name + "".join(f", then {part.elements} of {_name_of(part.dtype)}" for part in ahead)
            size = tensor.numel() * tensor.itemsize
            announced = self._announcement(Kind.REDUCE, size, _name_of(tensor.dtype), names)
            rows = self.exchange(announced, flags=flags, payload=(weight,))
            if rows is None:
                return None
            self.ahead.extend(ahead)
            flagged = {
                replica_id: (row.flags, row.payload[0])
                for replica_id, row in zip(assignment.replica_ids, rows, strict=True)
            }
        if all(each is Flag.NONE for each, _ in flagged.values()):
            return []
        skipped = sum(weight for each, weight in flagged.values() if each & Flag.SKIPS_BATCH)
        machine.skipped_weight = max(machine.skipped_weight, skipped)
        return [replica_id for replica_id, (each, _) in flagged.items() if each & Flag.NOT_FINITE]

    def compare_end(self) -> bool:
        """Announce the end of the step, and how this group draws its batches. Return whether all participants agree."""
        is_same = self.exchange(self._announcement(Kind.END)) is not None
        return is_same and self.exchange(announce_draw(self.data)) is not None

    def _announcement(self, kind: Kind, size: int = 0, dtype: str = "", name: str = "") -> Announced:
        assignment = self.machine.assignment
        return Announced(kind, self._collectives, size, dtype, name, assignment.max_step if assignment else 0)

    def exchange(
        self,
        announced: Announced,
        within_s: float | None = None,
        *,
        flags: Flag = Flag.NONE,
        payload: Sequence[int] = (),
    ) -> list[Row] | None:
        """Exchange announcements with all participants. Return their rows by replica_rank.

        The announcements must match, but `flags` and `payload` may differ. If the announcements differ, a peer is lost,
        or the exchange takes longer than `within_s` seconds (default: `attempt.limit_s`), fail the step and return
        None.
        """
        machine, assignment = self.machine, self.machine.assignment
        assert assignment is not None
        limit_s = self.attempt.limit_s if within_s is None else within_s
        if self.ahead:
            self._may_announce_ahead = False
            reason = "the script reduces something else between the buckets of a backward pass"
            self.attempt.fail("comparing", reason)
            return None
        received: list[tuple[int, ...]] = []
        heals = assignment.heals or assignment.catches_up
        commits = machine.commits
        standing = standing_of(heals=heals, max_step=assignment.max_step, has_trained=commits > 0)
        words = to_words(announced, standing, commits, flags, payload)
        if not self.attempt.run("comparing", lambda: received.extend(self.peers.exchange(words, limit_s))):
            return None
        rows = [from_words(each) for each in received]
        if faulty := find_faulty(rows):
            place = assignment.replica_rank
            text = explain(rows, faulty, assignment.replica_ids, place)
            self._end_faulty_groups(f"step {assignment.max_step}: {text}", is_own=place in faulty)
            return None
        return rows

    def _end_faulty_groups(self, what: str, *, is_own: bool) -> None:
        """Make the ranks in the groups at fault exit, because a retry would not help. The other groups continue.

        `what` is the error message. `is_own` is True if this rank's group is at fault.
        """
        log.error("%s", what)
        with suppress(RuntimeError):  # a barrier, after which all participants have received all announcements
            self.peers.exchange((0,), BARRIER_TIMEOUT_S)
        if is_own:
            self.mismatch = ScriptMismatch(f"{what}: {REMEDY}")
        self.machine.fail_step(what, is_blamed=not is_own)
        self.peers.drop()
        if is_own:
            self.manager.report(f"ScriptMismatch: {what}", ends_group=True)


def is_half(dtype: torch.dtype) -> bool:
    """Return whether `dtype` is a half-precision dtype. Such tensors are divided before the sum, to avoid overflow."""
    return dtype in (torch.float16, torch.bfloat16)


def dtype_of_sum(dtype: torch.dtype, reduce_dtype: str) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are summed, given the Agent's option `reduce_dtype`."""
    return torch.float32 if reduce_dtype == "float32" and is_half(dtype) else dtype


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
