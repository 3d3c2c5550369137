"""Messages of sessions (between a manager and the lighthouse) and of watches (between a rank and its manager).

Messages carry the current state, not changes. Each hello and heartbeat repeats the manager's quorum, whether the group
is draining and which ranks are down; each acknowledgement repeats the lighthouse's order. So a message that is lost
with its connection does no harm.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from lighthouse_protocol.constraints import (
    Advisory,
    Age,
    Count,
    EntryCount,
    FilledText,
    GroupRank,
    QuorumId,
    Ranks,
    Reason,
    Seconds,
    Secret,
    Text,
    UnknownAs,
)
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.chaos import FaultCancelled, FaultOrder, FaultReport
from lighthouse_protocol.messages.incident import EvidenceAsked, RankEvidence, SelfReport
from lighthouse_protocol.messages.membership import Decision, Participant, Quorum, QuorumChange, World
from lighthouse_protocol.messages.preemption import PreemptionChanged, PreemptionNoted, PreemptionReport
from lighthouse_protocol.messages.progress import GroupView, HealTotals, ProgressSample
from lighthouse_protocol.rank_set import NO_RANKS
from lighthouse_protocol.refusals import LighthouseError


class HoldState(StrEnum):
    """State of a manager's standing quorum, under which it lets its ranks start steps without asking the lighthouse."""

    STANDING = "standing"  # grants further steps
    RECALLED = "recalled"  # grants no step beyond its highest grant
    RESUMED = "resumed"  # grants steps up to a limit, then joins
    JOINING = "joining"  # has done its last step and grants no more
    LEAVING = "leaving"  # the ranks have exited normally; `granted` is their last committed step
    REVOKED = "revoked"  # revoked, or a step failed; grants no more


@dataclass(frozen=True, slots=True)
class HeldQuorum:
    """A manager's standing quorum, and the steps that the manager has let its ranks start under it."""

    quorum_id: QuorumId
    mode: HoldState
    granted: Count  # highest step granted to the ranks under this quorum
    wants_next: bool = False  # the group has caught up, or has failed to, and needs another quorum


class QuorumPhase(StrEnum):
    """Phase of a standing quorum, set by the lighthouse. It determines which steps managers may grant their ranks."""

    NONE = "none"  # no standing quorum: every step requires a request to the lighthouse
    RETURNING = "returning"  # the lighthouse has restarted: managers in the quorum may continue and must reconnect
    STANDING = "standing"
    RECALLED = "recalled"  # grant no new step and report the highest grant
    RESUMED = "resumed"  # grant steps up to `upto`, then join
    REVOKED = "revoked"  # stop, and abort unfinished steps


@dataclass(frozen=True, slots=True)
class QuorumOrder:
    """Order from the lighthouse to the managers in a standing quorum: act according to `phase`."""

    quorum_id: QuorumId
    # A phase that this version does not know stops the group, which then joins the next quorum.
    phase: Annotated[QuorumPhase, UnknownAs(QuorumPhase.REVOKED)]
    upto: Count = 0  # last step to grant, if the phase is RESUMED
    reason: Reason = ""
    lost: Reason = ""  # group that was lost, if the phase is REVOKED and the group is known


# Manager to lighthouse.


# Values of GroupReport.down. The first quorum of a job waits for a group that is STARTING.
STARTING = "its ranks have not come yet"
# The group lost ranks, and its supervisor has started them again.
RESTARTING = "its ranks are started again"
# The ranks exit normally, which the quorum does not count as a loss.
LEFT = "its ranks have ended"


@dataclass(frozen=True, slots=True)
class Discards:
    group_lost: Count = 0  # another group of the quorum was lost
    rank_lost: Count = 0  # a rank of this group was lost before its vote
    revoked: Count = 0  # the quorum was revoked without a lost group
    voted_no: Count = 0  # a rank voted no under a valid quorum


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Counters since the manager started. They never decrease."""

    commits: Count = 0
    discards: Discards = Discards()
    step_s: Age = 0.0  # time in committed steps during which no group healed
    healed: HealTotals = field(default_factory=HealTotals)  # a heal by all ranks counts once; bytes are summed
    discarded_s: Age = 0.0  # time in discarded steps during which no group healed


@dataclass(frozen=True, slots=True)
class GroupReport:
    """State of a replica group, repeated in every hello and heartbeat."""

    held: HeldQuorum | None = None  # standing quorum that the manager has
    drains: bool = False  # the group is leaving the job
    down: Reason = ""  # why the group cannot take part although its manager is alive; empty if it can
    missing: Ranks = NO_RANKS  # absent ranks; empty while `down` is set means all of them
    counts: Advisory[GroupCounts] = None  # None for a manager that does not count


@dataclass(frozen=True, slots=True)
class Hello:
    participant: Participant  # the same as in the last JoinRequest
    levels: GroupReport = GroupReport()
    secret: Secret = field(default="", repr=False)  # random, made at the manager's start, known to no other process


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat from a manager, sent every heartbeat_interval and after any change that the lighthouse is awaiting."""

    number: Count  # increasing
    levels: GroupReport = GroupReport()
    progress: Advisory[GroupView] = None  # None if unchanged


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Request to be in the next quorum. It replaces the group's earlier request."""

    number: Count  # increasing
    participant: Participant
    time_left_s: Seconds
    holds: Text = ""  # digest of the quorum that the manager has; empty to request the full list


@dataclass(frozen=True, slots=True)
class WithdrawRequest:
    number: Count


@dataclass(frozen=True, slots=True)
class Leave:
    """Announces that the group is leaving the job normally. A session that closes without it counts as a crash."""

    reason: Reason = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence about one rank, in answer to the EvidenceRequest with the same number."""

    number: Count
    rank: RankEvidence


@dataclass(frozen=True, slots=True)
class EvidenceDone:
    """Reports that the manager has sent all evidence for the EvidenceRequest with the same number."""

    number: Count
    progress: Advisory[GroupView] = None  # newest view, by which the lighthouse decides whether to restart ranks


ToLighthouse = (
    Hello | Heartbeat | JoinRequest | WithdrawRequest | Leave | Evidence | EvidenceDone | FaultReport | PreemptionReport
)


# Lighthouse to manager.


@dataclass(frozen=True, slots=True)
class Welcome:
    heartbeat_interval_s: Seconds
    lease_s: Seconds
    order: QuorumOrder | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    number: Count
    heartbeat_interval_s: Seconds
    order: QuorumOrder | None = None  # about the quorum in the heartbeat


@dataclass(frozen=True, slots=True)
class JoinAccepted:
    """Answer to the JoinRequest with number `join`: the quorum that includes the group."""

    join: Count
    quorum: Quorum
    stands: bool
    # Shared by the members, to authenticate each other (rules/access.py).
    secret: Secret = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class QuorumChanged:
    """Short form of JoinAccepted, for a manager that already has the quorum on which `change` is based."""

    join: Count
    change: QuorumChange
    stands: bool
    secret: Secret = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class JoinRejected:
    """Refusal of a JoinRequest or of the session's Hello."""

    join: Count  # 0 for the hello, after which the session ends
    error: LighthouseError


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Order to finish the step that the other groups expect of this group, and then leave."""

    reason: Reason = ""


@dataclass(frozen=True, slots=True)
class KillRequest:
    """Order to kill the group's ranks."""

    reason: Reason = ""
    # Ranks whose stall is the reason, which the supervisor counts as lost. Empty if an operator requested the kill.
    behind: Ranks = NO_RANKS


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Announces that the lighthouse is closing the session.

    It is sent when the lighthouse shuts down, the group has opened a newer session, or the group has left.
    """

    reason: Reason = ""


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """Request for evidence about the group's ranks.

    The manager answers within GATHERED_WITHIN_S with one Evidence per rank, then EvidenceDone.
    """

    number: Count
    group_ranks: Annotated[tuple[GroupRank, ...], EntryCount(MAX_GROUP_WORLD_SIZE)] = ()  # empty for all


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
    | FaultOrder
    | FaultCancelled
    | PreemptionNoted
)


# Rank and manager.


@dataclass(frozen=True, slots=True)
class EvidenceOffer:
    """Signal and file descriptor that yield a rank's stack traces even while its Python interpreter is blocked."""

    signal: Count = 0  # signal that makes the rank write its stacks; 0 if there is none
    descriptor: Count = 0  # the rank's file descriptor to which the stacks are written


@dataclass(frozen=True, slots=True)
class WatchHello:
    """First message of a watch (a rank's stream to its manager), in which the rank describes its process."""

    group_rank: GroupRank
    rank_incarnation: FilledText  # new at every start of the process
    pid: Count = 0
    host: Text = ""  # machine and pid namespace; if equal to the manager's, the manager also watches the pid
    started: Count = 0  # start time of the process, in clock ticks since boot
    hostname: Text = ""  # for display
    offer: EvidenceOffer | None = None  # None if the rank offers no evidence
    is_observer: bool = False  # the rank only reports its progress, and takes part in no quorum


@dataclass(frozen=True, slots=True)
class WatchOpened:
    """First message from the manager on a watch. It confirms that the manager is watching the rank."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Announces that the rank is closing its Agent normally, so the end of the watch is not a failure.

    The rank does not exit until it receives Released.
    """

    step: Count | None = None  # the next step that the rank would have requested, None within a step


@dataclass(frozen=True, slots=True)
class Released:
    """Permission for a leaving rank to exit, because no other rank needs its data."""


@dataclass(frozen=True, slots=True)
class RankGone:
    """Reports that another rank in the group was lost and has not returned.

    The remaining ranks would wait for it indefinitely, so the group must restart.
    """

    group_rank: GroupRank
    reason: Reason


@dataclass(frozen=True, slots=True)
class Revoked:
    """Order to abort the unfinished collectives of a quorum, vote, and then request another quorum."""

    quorum_id: QuorumId
    reason: Reason
    lost: Reason = ""  # lost group, empty if unknown; may follow in a second message


@dataclass(frozen=True, slots=True)
class Waiting:
    """Reason why the group's requests for a quorum have not been answered yet."""

    reason: Reason  # empty if no request waits, or none has waited for long


@dataclass(frozen=True, slots=True)
class Killed:
    """Order from a manager to a rank to exit with status 1."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Vote:
    """A rank's vote on whether to commit a step.

    The manager replies within `time_left_s` seconds with a VoteAnswer that carries the same `number`.
    """

    number: int
    step: int
    should_commit: bool
    quorum_id: int | None
    wants_next: bool
    time_left_s: Seconds


@dataclass(frozen=True, slots=True)
class VoteAnswer:
    """Answer to a Vote: the group's decision, or the error with which the manager refuses the vote."""

    number: int
    outcome: Decision | LighthouseError


FromRank = WatchHello | Vote | ProgressSample | SelfReport | Leaving
ToRank = (
    WatchOpened
    | Revoked
    | RankGone
    | Released
    | Waiting
    | Killed
    | VoteAnswer
    | EvidenceAsked
    | World
    | PreemptionChanged
    | FaultOrder
)
