"""What is known of a lighthouse from this host. Moments are Unix seconds by this host's clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.status import LighthouseStatus
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.access import Role


class Trust(StrEnum):
    """By what this host knows the lighthouse."""

    NONE = "none"  # no TLS
    PIN = "pin"  # of the CA, in a join string
    CA = "ca"  # a file with certificates of the user's own PKI


@dataclass(frozen=True, slots=True)
class Place:
    """An address of the lighthouse, and the IP address to which a TCP connection was made; or why none was."""

    address: str
    ip: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """`of`: whose, in words. `expires_at`: None: it could not be read, and `error` says why."""

    of: str
    expires_at: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Credential:
    """What this host shows of itself. `role`: of its token, by how that begins; None: there is no token, or one that
    says no role."""

    has_token: bool = False
    role: Role | None = None
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """The lighthouse's status, or why there is none."""

    address: str
    began_at: float
    ended_at: float
    status: LighthouseStatus | None = None
    refusal: LighthouseError | None = None


@dataclass(frozen=True, slots=True)
class ManagerSeen:
    """A manager from this host. `error`: why it is not reached; empty: it is. `lighthouse_error`: why it does not reach
    the lighthouse, by its own word; None: it does, or may not tell."""

    job: str
    replica_id: str
    address: str
    error: str = ""
    lighthouse_error: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """`managers`: those that the lighthouse counts as alive and that have an address."""

    now: float
    places: tuple[Place, ...]
    trust: Trust
    certificate: Certificate | None
    credential: Credential
    asked: Asked | None
    version: str
    packages: Mapping[str, str]
    managers: tuple[ManagerSeen, ...] = ()
    oldest_torch: str = ""
