"""Exceptions for failed requests. Each message states the cause, whose fault it is and what to do.

The pure state machines also return these exceptions as values. lighthouse_protocol/wire/codec.py maps each class to a
gRPC status and back.
"""

import re

_TOKEN = re.compile(r"(lighthouse://(?:[0-9a-fA-F]{64}|tls|insecure|[^\s.@]*(?=\.\S*@)))\.[^\s@,'\"`]+")


class LighthouseError(Exception):
    """Base class of the exceptions in this module.

    Messages are logged, so the constructor removes the tokens in join strings from them.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_TOKEN.sub(r"\1....", message))


class InvalidRequest(LighthouseError):
    """The request is malformed. The message starts with the name of the invalid field."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)


class DuplicateReplica(LighthouseError):
    """Two live callers use the same replica_id."""


class WrongState(LighthouseError):
    """The request is valid, but not in the current state. The message names the request and the state."""


class Unrecoverable(LighthouseError):
    """No retry can succeed, so the caller must exit. The message gives the reason."""


class UnknownName(LighthouseError):
    """The job, replica group, rank or incident that the request names does not exist."""


class NotPermitted(LighthouseError):
    """The caller lacks a permission. The message explains how to get it."""


class NotServed(LighthouseError):
    """The server does not implement this RPC, because it is another program or another version."""


class Superseded(LighthouseError):
    """A newer request from the same caller replaces this request."""


class Drained(LighthouseError):
    """The group has been drained and has completed its last step."""


class LimitReached(LighthouseError):
    """The request exceeds a configured limit."""


class Unreachable(LighthouseError):
    """The server cannot be reached or is shutting down."""


class NotLeader(Unreachable):
    """This lighthouse is not the leader and did nothing. `leader` is the leader's address, or empty if unknown."""

    def __init__(self, message: str, *, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class WrongProtocol(Unreachable):
    """Another program answers on this port. A retry does not help."""


class Untrusted(WrongProtocol):
    """The server's certificate is expired or does not match the join string. A retry does not help."""


class DeadlinePassed(LighthouseError, TimeoutError):
    """The deadline passed before an answer arrived."""


class InternalError(LighthouseError):
    """The server failed because of a bug."""
