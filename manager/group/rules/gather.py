"""All ranks of the group have asked for a quorum: then, and only then, the group joins.

A replica group is one member only when all its ranks are there. Ranks that hold different states (an Agent says so by
its tag) join as a group that disagrees, at their lowest step, and heal. Callers without tags whose steps differ are
all refused, with both numbers: they cannot be told to heal. Ranks whose states differ, or one that holds none any
more, and that no group of the quorum can heal, must end. Only a group that is alone in its quorum and had peers in the
one before asks again, for a while: they may hold the state, and be away for a moment. One that was alone before, too,
had that state to itself. Where that is not known, of a manager that has started below its ranks, a rank that has torn
its state may have had peers.

A rank that asks again takes the place of its older call; one that withdraws takes the group's join back. An answer
belongs to the round it was asked in and never reaches another. An error reaches every waiting rank at once.

A rank whose process is new (`rank_incarnation` differs) has lost its state: the group takes a new incarnation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse_protocol.constraints import check_count
from lighthouse_protocol.messages.membership import Assignment, Distrust, Quorum, Tag
from lighthouse_protocol.refusals import InternalError, InvalidRequest, LighthouseError, WrongState
from manager.group.rules.assignment import assign
from manager.group.rules.request import QuorumRequest, check_rank, no_state, steps_differ, superseded


@dataclass(frozen=True, slots=True)
class Withdrawn:
    call: int


@dataclass(frozen=True, slots=True)
class QuorumReceived:
    round: int
    quorum: Quorum
    stands: bool = False


@dataclass(frozen=True, slots=True)
class JoinFailed:
    round: int
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """Every rank has asked: join the lighthouse with this, as round `round`. `step` and tag are of the state that the
    group holds; `works_at` is its step, where it holds an older one."""

    round: int
    step: int
    incarnation: int
    tag_quorum_id: int | None
    ranks_disagree: bool
    shrink_only: bool
    commit_failures: int
    seen_quorum_id: int
    deadline_at: float
    handles: tuple[str, ...]
    catch_up: bool = False
    works_at: int | None = None
    has_source: bool = False
    compares: bool = False
    distrust: Distrust | None = None
    heals_first: bool | None = None


@dataclass(frozen=True, slots=True)
class JoinTakenBack:
    round: int


@dataclass(frozen=True, slots=True)
class RankAnswered:
    call: int
    assignment: Assignment
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class RankRefused:
    call: int
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class RoundAnswered:
    """All ranks were told: the step under way is `step`, the quorum's max_step: a rank that is behind heals to it."""

    quorum_id: int
    step: int


Event = QuorumRequest | Withdrawn | QuorumReceived | JoinFailed
Effect = GroupJoined | JoinTakenBack | RankAnswered | RankRefused | RoundAnswered


class GatherMachine:
    """No time passes here: the callers' deadlines end their calls, and the join carries the earliest of them."""

    def __init__(self, wire_id: str, group_world_size: int) -> None:
        self._wire_id = wire_id
        self._size = group_world_size
        self._asks: dict[int, QuorumRequest] = {}
        self.round = 0  # the number of the last join
        self.is_joined = False
        self._last: dict[int, QuorumRequest] = {}
        self.incarnation = 0
        self._max_step: int | None = None
        self._lowest: dict[int, tuple[Tag, int]] = {}  # of the quorums that a rank was answered with that state
        self._had_peers: bool | None = None  # in the last quorum, these same processes; None: not known
        self.quorum_id = 0
        self.step = 0
        """Of the state that the group holds, or may have come to hold since it joined: no lower one."""

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(sorted(self._asks))

    @property
    def asks(self) -> tuple[QuorumRequest, ...]:
        """Those that wait."""
        return tuple(self._asks.values())

    def call_of(self, group_rank: int) -> int | None:
        """The call of a rank that waits."""
        ask = self._asks.get(group_rank)
        return None if ask is None else ask.call

    @property
    def max_step(self) -> int:
        """The step that the last quorum was formed for."""
        return self._max_step or 0

    def checkpoint_address(self, group_rank: int, step: int | None) -> str:
        """Of the rank's last ask. Raises a refusal for a rank that never asked, or is at another step."""
        check_rank(group_rank, self._size)
        last = self._last.get(group_rank)
        if last is None:
            raise WrongState(f"rank: rank {group_rank} has not asked for a quorum yet; ask again once it has")
        if step is not None and last.step != step:
            raise WrongState(f"step: rank {group_rank} is at step {last.step}, not at {step}; ask for a new quorum")
        return last.checkpoint_address

    def handle(self, event: Event) -> Sequence[Effect]:
        match event:
            case QuorumRequest():
                return self._ask(event)
            case Withdrawn(call):
                return self._withdraw(call)
            case QuorumReceived(number, quorum, stands):
                return self._receive(quorum, stands) if self.is_joined and number == self.round else []
            case JoinFailed(number, error):
                return self.refuse_all(error) if self.is_joined and number == self.round else []

    def _ask(self, ask: QuorumRequest) -> list[Effect]:
        try:
            check_rank(ask.group_rank, self._size)
            self._check_step(ask)
        except LighthouseError as e:
            return [RankRefused(ask.call, e)]
        effects: list[Effect] = []
        older = self._asks.get(ask.group_rank)
        if older is not None:
            effects += [
                *self._withdraw(older.call),
                RankRefused(older.call, superseded(ask.group_rank)),
            ]
        self._note_worker(ask)
        self._asks[ask.group_rank] = self._last[ask.group_rank] = ask
        odd = next((other for other in self._asks.values() if _cannot_meet(ask, other)), None)
        if odd is not None:
            return effects + self.refuse_all(steps_differ(ask, odd))
        return effects + (self._join() if len(self._asks) == self._size else [])

    def _check_step(self, ask: QuorumRequest) -> None:
        check_count(ask.step, "step")
        last = self._last.get(ask.group_rank)
        if last is None or last.rank_incarnation != ask.rank_incarnation:
            return
        # What counts is the state that the rank holds: one that catches up works at a later step, and may return. It
        # may have been told to heal to an older state than its own, and that, where it catches up, some quorums ago.
        held, was_held = ask.holds.step, last.holds.step
        since, lowest = self._lowest.get(ask.group_rank, (last.holds, was_held))
        if held < (min(was_held, lowest) if since == last.holds else was_held):
            raise InvalidRequest(
                f"of rank {ask.group_rank} went from {was_held} back to {held}; "
                "a rank that lost its state restarts, and its group with it",
                field="step",
            )

    def _note_worker(self, ask: QuorumRequest) -> None:
        last = self._last.get(ask.group_rank)
        if last is not None and last.rank_incarnation != ask.rank_incarnation:
            self.incarnation += 1
            if self._had_peers:
                self._had_peers = None
            self.step = min(self.step, ask.holds.step)  # a session that opens before the group joins says it

    def _join(self) -> list[Effect]:
        asks = [self._asks[rank] for rank in sorted(self._asks)]
        states = {ask.holds for ask in asks}
        distrust = next((ask.distrust for ask in asks if ask.distrust is not None), None)
        lags = any(ask.catch_up.held for ask in asks)
        self.round += 1
        self.is_joined = True
        self.step = min(ask.holds.step for ask in asks)
        return [
            GroupJoined(
                round=self.round,
                step=self.step,
                incarnation=self.incarnation,
                tag_quorum_id=asks[0].holds.quorum_id if len(states) == 1 and distrust is None else None,
                ranks_disagree=len(states) > 1 or distrust is not None,
                shrink_only=any(ask.shrink_only for ask in asks),
                commit_failures=max(ask.commit_failures for ask in asks),
                seen_quorum_id=self.quorum_id,
                deadline_at=min(ask.deadline_at for ask in asks),
                handles=tuple(ask.handle for ask in asks),
                catch_up=all(ask.catch_up.is_wanted for ask in asks),
                works_at=max(ask.step for ask in asks) if lags else None,
                has_source=all(ask.catch_up.has_source for ask in asks),
                compares=all(ask.compares for ask in asks),
                distrust=distrust,
                heals_first=_heals_first(asks),
            )
        ]

    def _withdraw(self, call: int) -> list[Effect]:
        rank = next((rank for rank, ask in self._asks.items() if ask.call == call), None)
        if rank is None:
            return []
        del self._asks[rank]
        if not self.is_joined:
            return []
        self.is_joined = False
        return [JoinTakenBack(self.round)]

    def _receive(self, quorum: Quorum, stands: bool) -> list[Effect]:
        if quorum.quorum_id < self.quorum_id:
            return self.refuse_all(_went_back(quorum.quorum_id, self.quorum_id))
        answers: list[RankAnswered] = []
        for ask in self._asks.values():
            assignment = assign(quorum, self._wire_id, ask.group_rank, ask.init_sync, stands=stands)
            if assignment is None:
                return self.refuse_all(
                    InternalError(f"the lighthouse's quorum {quorum.quorum_id} lacks {self._wire_id}")
                )
            answers.append(RankAnswered(ask.call, assignment, quorum))
        self.quorum_id = quorum.quorum_id
        mine = answers[0].assignment
        is_behind = mine.heals or mine.place is None
        is_alone = len(quorum.participants) == 1
        if not is_behind and (error := self._without_state(is_alone=is_alone)) is not None:
            return self.refuse_all(error)
        self._had_peers = not is_alone
        self._max_step = mine.max_step
        self._note_lowest(mine.max_step)
        self._asks = {}
        self.is_joined = False
        return [RoundAnswered(quorum.quorum_id, self._max_step), *answers]

    def _without_state(self, *, is_alone: bool) -> LighthouseError | None:
        """Why the waiting ranks cannot train without healing, if they hold different states, or one holds none."""
        asks = tuple(self._asks.values())
        torn = next((ask for ask in asks if ask.distrust is not None), None)
        odd = torn or next((other for other in asks[1:] if other.holds != asks[0].holds), None)
        if odd is None:
            return None
        had_peers = torn is not None if self._had_peers is None else self._had_peers
        return no_state(asks[0], odd, may_heal=is_alone and had_peers)

    def _note_lowest(self, max_step: int) -> None:
        for group_rank, ask in self._asks.items():
            held, lowest = self._lowest.get(group_rank, (ask.holds, max_step))
            lowest = min(lowest, max_step) if held == ask.holds else max_step
            self._lowest[group_rank] = ask.holds, lowest
            self.step = min(self.step, lowest)

    def refuse_all(self, error: LighthouseError) -> list[Effect]:
        """Every waiting rank gets `error`."""
        taken_back: list[Effect] = [JoinTakenBack(self.round)] if self.is_joined else []
        refused: list[Effect] = [RankRefused(ask.call, error) for ask in self._asks.values()]
        self._asks = {}
        self.is_joined = False
        return taken_back + refused


def _heals_first(asks: Sequence[QuorumRequest]) -> bool | None:
    """None: a rank of the group does not say."""
    said = [ask.heals_first for ask in asks]
    return None if None in said else all(said)


def _cannot_meet(ask: QuorumRequest, other: QuorumRequest) -> bool:
    """At different steps; and one of them, being no Agent, could not heal inside its group's step."""
    return ask.step != other.step and not (ask.rank_incarnation and other.rank_incarnation)


def _went_back(received: int, seen: int) -> WrongState:
    return WrongState(
        f"quorum_id: the lighthouse answered {received} after {seen}; it has forgotten what it gave out. Ask again: "
        "it is told the higher id"
    )
