"""Why there is, or is not, a quorum."""

from enum import StrEnum


class Verdict(StrEnum):
    NOBODY_ASKS = "nobody_asks"
    FORMED = "formed"
    READY = "ready"
    TOO_FEW_PARTICIPANTS = "too_few_participants"
    NO_ALLOWED_SIZE = "no_allowed_size"
    WAITING_FOR_MEMBERS = "waiting_for_members"
    WAITING_FOR_STRAGGLERS = "waiting_for_stragglers"
    WAITING_FOR_RECALL = "waiting_for_recall"
    WAITING_FOR_RETURN = "waiting_for_return"
    WAITING_FOR_LEASES = "waiting_for_leases"
    WAITING_FOR_LAST_CALL = "waiting_for_last_call"
