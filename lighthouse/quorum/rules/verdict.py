"""Why there is, or is not, a quorum."""

from enum import StrEnum


class Verdict(StrEnum):
    NO_JOINS = "no_joins"
    FORMED = "formed"
    READY = "ready"
    TOO_FEW_PARTICIPANTS = "too_few_participants"
    NO_ALLOWED_SIZE = "no_allowed_size"
    WAITING_FOR_MEMBERS = "waiting_for_members"
    WAITING_FOR_STRAGGLERS = "waiting_for_stragglers"
    WAITING_FOR_RECALL = "waiting_for_recall"
    WAITING_FOR_RECONNECT = "waiting_for_reconnect"
    WAITING_FOR_LEASES = "waiting_for_leases"
    WAITING_FOR_LOST_MEMBER = "waiting_for_lost_member"
