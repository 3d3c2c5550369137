"""Why a request was not done. Every refusal says what happened, whose fault it is and what to do.

These are plain exceptions without I/O, so that the pure machines can hand them out as values;
lighthouse_protocol/wire/codec.py maps each to a gRPC status and back.
"""

import re

_TOKEN = re.compile(r"(lighthouse://(?:[0-9a-fA-F]{64}|tls|insecure|[^\s.@]*(?=\.\S*@)))\.[^\s@,'\"`]+")


class LighthouseError(Exception):
    """Any refusal. `may_have_happened` tells a caller whether the request may have taken effect all the same.

    Its text never shows the token of a join string, whoever quotes one: refusals are logged and filed as reasons.
    """

    may_have_happened = False

    def __init__(self, message: str = "") -> None:
        super().__init__(_TOKEN.sub(r"\1....", message))


class InvalidRequest(LighthouseError):
    """The caller's request is malformed; the message starts with the name of the field."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)


class DuplicateReplica(LighthouseError):
    """Two live callers use one replica_id."""


class WrongState(LighthouseError):
    """The request is well formed and does not fit the state it meets; the message names both."""


class Unrecoverable(LighthouseError):
    """The caller's state cannot become one that fits, however often it asks: it has to end. The message says why."""


class UnknownName(LighthouseError):
    """No such replica, rank or job."""


class NotPermitted(LighthouseError):
    """The caller may not do that; the message says how it could."""


class NotServed(LighthouseError):
    """The other side has no such RPC: another program, or another version."""


class Superseded(LighthouseError):
    """The same caller asked again; only its newest call is answered."""


class Drained(LighthouseError):
    """The group was asked to leave and has done its last step."""


class LimitReached(LighthouseError):
    """A configured limit is full."""


class Unreachable(LighthouseError):
    """The other side could not be reached, or is going away."""

    may_have_happened = True


class NotLeader(Unreachable):
    """This lighthouse does not lead; nothing was done. `leader`: the address of the one that does; empty: not known."""

    may_have_happened = False

    def __init__(self, message: str, *, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class WrongProtocol(Unreachable):
    """What listens there is no daemon of ours, and no retry makes it one."""


class Untrusted(WrongProtocol):
    """The certificate there is not the one that the join string names, or has expired: a retry does not mend it."""


class DeadlinePassed(LighthouseError, TimeoutError):
    """The caller's time was over before an answer existed."""

    may_have_happened = True


class InternalError(LighthouseError):
    """A defect on the other side."""

    may_have_happened = True
