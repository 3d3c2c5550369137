"""Notices that a host will be taken away, and the messages that carry them.

A notice contains a Unix time, so the clocks of hosts should agree within a second.
"""

from dataclasses import dataclass

from lighthouse_protocol.constraints import Count, FilledText, Offset, Reason


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """Notice that a host is about to be taken away, for example because the cloud is reclaiming a spot instance."""

    source: FilledText  # aws, gcp, azure, slurm, kubernetes, file or http
    reason: Reason = ""
    host: Reason = ""  # host that will be taken away
    ends_at_unix_s: Offset | None = None  # None if unknown
    is_advice: bool = False  # the host is only likely to be taken away (AWS rebalance recommendation)

    def left_s(self, now_unix_s: float) -> float | None:
        """Return the seconds until the host is taken away, 0 if that time has passed, or None if it is unknown."""
        return None if self.ends_at_unix_s is None else max(0.0, self.ends_at_unix_s - now_unix_s)


@dataclass(frozen=True, slots=True)
class PreemptionReport:
    """Reports a notice or its withdrawal, from a manager to the lighthouse or from a supervisor to host 0."""

    notice: PreemptionNotice | None  # None if the notice was withdrawn


@dataclass(frozen=True, slots=True)
class PreemptionNoted:
    """The lighthouse's answer to a PreemptionReport: how many other groups will stay.

    The lighthouse sends it again when that number falls to 0 or rises from 0.
    """

    others: Count  # connected replica groups that stay


@dataclass(frozen=True, slots=True)
class PreemptionChanged:
    """Sent by a manager to its ranks when a host of the group is about to be preempted, or a notice is withdrawn."""

    notice: PreemptionNotice | None  # None if the notice was withdrawn
    should_save: bool = False  # no other group stays, so the rank saves a checkpoint before it exits
