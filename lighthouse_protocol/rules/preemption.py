"""Rules for how a replica group reacts when its hosts will be taken away. This module does no I/O.

A notice makes the group drain: it completes its step and leaves, so the other groups lose no steps. If no other group
stays, its ranks also save a checkpoint after that step, provided that enough time is left. Advice, such as an AWS
rebalance recommendation, does not end a group: it only means that a notice has become more likely.
"""

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from lighthouse_protocol.messages.preemption import PreemptionNotice

ANSWER_WITHIN_S = 2.0
"""Maximum time to wait for the lighthouse to report how many other groups stay."""
MIN_SAVE_S = 5.0
"""Minimum time left to begin a checkpoint. With less, the checkpoint would probably be incomplete."""
EXIT_MARGIN_S = 2.0
"""Time between the end of a save and the end of the host, in which the processes exit."""
UNKNOWN_LEFT_S = 25.0
"""Time that is assumed to be left if a notice gives no end: the shortest notice of any cloud, rounded down."""


class Action(StrEnum):
    STAY = "stay"  # continue training
    ASK = "ask"  # wait for the lighthouse to report how many other groups stay
    DRAIN = "drain"  # leave after the current step
    SAVE = "save"  # leave after the current step, then save a checkpoint


class Plan(NamedTuple):
    action: Action
    reason: str
    save_s: float = 0.0  # time for the checkpoint, counted from now


def most_urgent(notices: Iterable[PreemptionNotice]) -> PreemptionNotice | None:
    """Return the notice whose host will be taken away first, or None if `notices` is empty.

    Notices without a known time come after the others, and notices that are only advice come last.
    """

    def urgency(notice: PreemptionNotice) -> tuple[bool, float, str, str]:
        ends_at = math.inf if notice.ends_at_unix_s is None else notice.ends_at_unix_s
        return notice.is_advice, ends_at, notice.source, notice.host

    return min(notices, key=urgency, default=None)


def save_left_s(notice: PreemptionNotice, now_unix_s: float) -> float:
    """Return the seconds that are left to complete a checkpoint. The result may be negative."""
    left_s = notice.left_s(now_unix_s)
    return (UNKNOWN_LEFT_S if left_s is None else left_s) - EXIT_MARGIN_S


def plan(
    notice: PreemptionNotice | None, others: int | None, now_unix_s: float, asked_at_unix_s: float = -math.inf
) -> Plan:
    """Decide what the group does now.

    Args:
        notice: The most urgent notice, or None if there is none.
        others: Number of other groups that stay, or None if the lighthouse has not answered yet.
        now_unix_s: Current Unix time in seconds.
        asked_at_unix_s: When the lighthouse was sent the notice, in Unix time. By default, do not wait for an answer.
    """
    if notice is None:
        return Plan(Action.STAY, "no notice")
    if notice.is_advice:
        return Plan(Action.STAY, "the notice is only advice")
    if others is None and now_unix_s < asked_at_unix_s + ANSWER_WITHIN_S:
        return Plan(Action.ASK, "waiting for the lighthouse to count the groups that stay")
    if others:
        return Plan(Action.DRAIN, f"{others} other {'group stays' if others == 1 else 'groups stay'}")
    who = "no other group stays" if others == 0 else "the lighthouse does not answer"
    save_s = save_left_s(notice, now_unix_s)
    if save_s < MIN_SAVE_S:
        return Plan(Action.DRAIN, f"{who}, and too little time is left to save a checkpoint")
    return Plan(Action.SAVE, f"{who}, so its ranks save a checkpoint within {save_s:.0f} s", save_s)
