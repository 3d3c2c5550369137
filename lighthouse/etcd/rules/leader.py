"""What the leader's key says, for the other lighthouses and for those that look for the leader."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Leader:
    """`candidate` is new with each process; `address` is where it serves gRPC, `page` its URL. `term` grows
    with each leader. `ca_pin`: of the CA that vouches for it, where that is its own."""

    candidate: str
    address: str
    page: str
    term: int
    ca_pin: str = ""


def difference(own: Leader, other: Leader) -> str:
    """What keeps the managers that trust one of two lighthouses from the other; empty: nothing that the keys tell."""
    if own.ca_pin == other.ca_pin:
        return ""
    return (
        f"the leader {other.address} has another CA (pin {other.ca_pin[:12] or 'none'}) than this lighthouse (pin "
        f"{own.ca_pin[:12] or 'none'}): a join string is good for one of them alone; stop this lighthouse, give it a "
        "copy of the other one's --credentials folder, and start it again"
    )


def dump(leader: Leader) -> bytes:
    return json.dumps(asdict(leader), separators=(",", ":")).encode()


def parse(raw: bytes) -> Leader:
    """The inverse of `dump`; a field that the reader does not know is skipped. Raises ValueError."""
    try:
        document = json.loads(raw)
        return Leader(
            str(document["candidate"]),
            str(document["address"]),
            str(document["page"]),
            int(document["term"]),
            str(document.get("ca_pin", "")),
        )
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"{raw[:80]!r} names no leader") from e
