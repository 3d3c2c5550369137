"""What a manager and the lighthouse say to each other on a session, and a rank and its manager on a watch. No protobuf.

Levels, not edges: what a manager holds, whether it drains and whether its ranks are down is repeated in its hello and
in every beat; what the lighthouse wants of a quorum is repeated in every echo. A message that was lost with a broken
connection costs nothing.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from lighthouse_protocol.constraints import (
    Advisory,
    Age,
    Count,
    Entries,
    FilledText,
    GroupRank,
    QuorumId,
    Ranks,
    Reason,
    Seconds,
    Secret,
    Text,
)
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.incident import EvidenceAsked, RankEvidence, SelfReport
from lighthouse_protocol.messages.membership import Decision, Participant, Quorum, QuorumChange, World
from lighthouse_protocol.messages.progress import GroupView, HealTotals, ProgressSample
from lighthouse_protocol.rank_set import NO_RANKS
from lighthouse_protocol.refusals import LighthouseError


class HoldState(StrEnum):
    """How a manager holds the standing quorum that it was handed last."""

    STANDING = "standing"  # it grants the next step by itself
    RECALLED = "recalled"  # recalled: it grants nothing beyond its highest grant
    RESUMED = "resumed"  # it grants up to a step, then joins
    JOINING = "joining"  # it has done the last step that it may, and never grants under it again
    LEAVING = "leaving"  # its ranks have ended in good order; `granted` is what they have committed
    REVOKED = "revoked"  # revoked, or a step failed; it never grants under it again


@dataclass(frozen=True, slots=True)
class HeldQuorum:
    """`granted` is the highest step that the manager's ranks were let into under that quorum.

    `wants_next`: the group catches up under it, and has got there, or cannot: it is to be followed by another one.
    """

    quorum_id: QuorumId
    mode: HoldState
    granted: Count
    wants_next: bool = False


class QuorumPhase(StrEnum):
    """What the lighthouse wants of a standing quorum."""

    NONE = "none"  # there is none: every step asks the lighthouse
    RETURNING = "returning"  # the lighthouse has restarted: who holds it may go on, and is to come back
    STANDING = "standing"
    RECALLED = "recalled"  # grant nothing new, and say what was granted
    RESUMED = "resumed"  # grant up to `upto`, then join
    REVOKED = "revoked"  # stop, and abort what has not completed


@dataclass(frozen=True, slots=True)
class QuorumOrder:
    """`upto`: of RESUMED. `lost`: the group that the quorum has lost, where it is revoked; empty: none is known."""

    quorum_id: QuorumId
    phase: QuorumPhase
    upto: Count = 0
    reason: Reason = ""
    lost: Reason = ""


# -- manager to lighthouse


# Why a group is down whose ranks have not all come yet: the first quorum of a job waits for it.
STARTING = "its ranks have not come yet"
# Why a group is down that has lost ranks, since its supervisor has started them again.
RESTARTING = "its ranks are started again"
# Why a group is down whose ranks end in good order: it is no loss to its quorum.
LEFT = "its ranks have ended"


@dataclass(frozen=True, slots=True)
class Discards:
    """Discarded steps, by reason: `group_lost`: another replica group of the quorum was lost; `rank_lost`: a rank of
    this group was lost before it voted; `revoked`: the quorum was revoked, and no group was lost; `voted_no`: a rank
    voted no under a quorum that stood."""

    group_lost: Count = 0
    rank_lost: Count = 0
    revoked: Count = 0
    voted_no: Count = 0


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Since the manager started; each number only grows. `step_s`: the time in committed steps in which no group
    healed. `healed`: a heal of all ranks of the group counts once, and their bytes are added up."""

    commits: Count = 0
    discards: Discards = Discards()
    step_s: Age = 0.0
    healed: HealTotals = field(default_factory=HealTotals)


@dataclass(frozen=True, slots=True)
class GroupReport:
    """`down` says why the group cannot take part though its manager lives; empty: all its ranks are there. `missing`:
    which of them are not; empty while `down` says something: all of them. `counts`: None for a manager that does not
    count."""

    held: HeldQuorum | None = None
    drains: bool = False
    down: Reason = ""
    missing: Ranks = NO_RANKS
    counts: Advisory[GroupCounts] = None


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a session. `participant` is as in the last join. `secret`: random, made by this start of the
    manager; it shows it in every hello, and no other process knows it."""

    participant: Participant
    levels: GroupReport = GroupReport()
    secret: Secret = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent at every heartbeat_interval, and at once when a level changes. `number` grows. `progress`: where the ranks
    are; None: as was told before."""

    number: Count
    levels: GroupReport = GroupReport()
    progress: Advisory[GroupView] = None


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """`number` grows; a newer one takes the place of an older. `holds`: the digest of the last quorum that the manager
    was told, of which it needs but the changes; empty: it needs the whole list."""

    number: Count
    participant: Participant
    time_left_s: Seconds
    holds: Text = ""


@dataclass(frozen=True, slots=True)
class WithdrawRequest:
    number: Count


@dataclass(frozen=True, slots=True)
class Leave:
    """The group has gone in good order. A session that ends without it is a crash."""

    reason: Reason = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of one rank, an answer to the request of that number."""

    number: Count
    rank: RankEvidence


@dataclass(frozen=True, slots=True)
class EvidenceDone:
    """No more comes to the request of that number. `progress`: where the ranks are by then, which decides what is done
    about them."""

    number: Count
    progress: Advisory[GroupView] = None


ToLighthouse = Hello | Heartbeat | JoinRequest | WithdrawRequest | Leave | Evidence | EvidenceDone


# -- lighthouse to manager


@dataclass(frozen=True, slots=True)
class Welcome:
    heartbeat_interval_s: Seconds
    lease_s: Seconds
    order: QuorumOrder | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """The answer to beat `number`. `order` is about the quorum that the beat said it holds."""

    number: Count
    heartbeat_interval_s: Seconds
    order: QuorumOrder | None = None


@dataclass(frozen=True, slots=True)
class JoinAccepted:
    """The answer to join `join`. `secret`: known to the members of that quorum alone, which prove by it to each other
    that they are (rules/proof.py)."""

    join: Count
    quorum: Quorum
    stands: bool
    secret: Secret = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class QuorumChanged:
    """A JoinAccepted for a manager whose join said that it holds the quorum that `change` is about."""

    join: Count
    change: QuorumChange
    stands: bool
    secret: Secret = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class JoinRejected:
    """`join` was refused; 0: the hello was, and the session ends."""

    join: Count
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Leave after the step that the others know of."""

    reason: Reason = ""


@dataclass(frozen=True, slots=True)
class KillRequest:
    """`behind`: the ranks that the group is killed for, which its supervisor counts as a loss; empty: a person asks."""

    reason: Reason = ""
    behind: Ranks = NO_RANKS


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The lighthouse ends this session: it stops, or a newer session has taken its place, or the leave is done."""

    reason: Reason = ""


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """What are these ranks doing? Empty: all. Answered by an Evidence for each of them, then EvidenceDone, within
    GATHERED_WITHIN_S."""

    number: Count
    group_ranks: Annotated[tuple[GroupRank, ...], Entries(MAX_GROUP_WORLD_SIZE)] = ()


ToManager = (
    Welcome
    | HeartbeatAck
    | JoinAccepted
    | JoinRejected
    | QuorumOrder
    | DrainRequest
    | KillRequest
    | Goodbye
    | EvidenceRequest
    | World
    | QuorumChanged
)


# -- rank and manager


@dataclass(frozen=True, slots=True)
class EvidenceOffer:
    """A rank can be asked what it is doing. `signal` has its stacks written to its file `descriptor`, also while it
    runs no Python; 0: there is no such signal."""

    signal: Count = 0
    descriptor: Count = 0


@dataclass(frozen=True, slots=True)
class WatchHello:
    """The first message of a watch: what a rank says of its process. `host` names the machine and its pid namespace;
    `started` the process's start.

    Where `host` is the manager's own, the manager watches the process too, by its pid. `hostname` is for a person.
    `rank_incarnation` is new at every start of the process. `offer`: None for a rank that cannot be asked.
    `is_observer`: it tells where the rank is, and takes part in no quorum.
    """

    group_rank: GroupRank
    rank_incarnation: FilledText
    pid: Count = 0
    host: Text = ""
    started: Count = 0
    hostname: Text = ""
    offer: EvidenceOffer | None = None
    is_observer: bool = False


@dataclass(frozen=True, slots=True)
class WatchOpened:
    """The first answer: the rank is watched."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The rank closes its Agent in good order: the end of its watch is no failure of its process. It stays until it is
    told that it is released. `step`: which it would have asked for next; None: it is in the middle of one."""

    step: Count | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """To a rank that leaves: nobody waits for what it has sent any more."""


@dataclass(frozen=True, slots=True)
class RankGone:
    """A rank of the same group was lost and is not back: what its mates wait for inside the group never comes, and the
    group has to be started again."""

    group_rank: GroupRank
    reason: Reason


@dataclass(frozen=True, slots=True)
class Revoked:
    """Abort the collectives of that quorum that have not completed, vote, and ask again. `lost`: the group that it has
    lost; empty: none is known. It may be told after the rest."""

    quorum_id: QuorumId
    reason: Reason
    lost: Reason = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the group's requests for a quorum wait for, in words; empty: for nothing, or not for long."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Killed:
    """End the process with status 1."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Vote:
    """A vote, by a rank that holds a watch: answered by a VoteAnswer of the same number within `time_left_s`."""

    number: int
    step: int
    should_commit: bool
    quorum_id: int | None
    wants_next: bool
    time_left_s: Seconds


@dataclass(frozen=True, slots=True)
class VoteAnswer:
    """The answer to a vote: what was decided, or why it was refused."""

    number: int
    outcome: Decision | LighthouseError


FromRank = WatchHello | Vote | ProgressSample | SelfReport | Leaving
ToRank = WatchOpened | Revoked | RankGone | Released | Waiting | Killed | VoteAnswer | EvidenceAsked | World
