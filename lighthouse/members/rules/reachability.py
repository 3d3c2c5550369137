"""Which members their peers can reach: the loopback rule. No look-ups: a manager reports what its own name resolves to.

The peers of a member on a loopback would connect to themselves. Beside a member that can be reached from everywhere it
has no place, whichever came first; among its like it is on one host with them, and welcome.
"""

from functools import lru_cache

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.refusals import WrongState


def is_loopback(participant: Participant) -> bool | None:
    """Whether it can be reached from its own host only; None for one that advertises nothing."""
    addresses = [text for text in (participant.address, participant.store_address) if text]
    if not addresses:
        return None
    return participant.resolves_to_loopback or any(map(_is_literal_loopback, addresses))


def unreachable(hidden: Participant, routable: Participant) -> WrongState:
    """Why `hidden` has no place beside `routable`."""
    return WrongState(
        f"address: {hidden.replica_id} advertises {_what_is_hidden(hidden)} beside "
        f"{routable.replica_id} ({routable.address or routable.store_address}); its peers cannot reach it: "
        "start its manager with --advertise ADDRESS, an address of its host"
    )


def _what_is_hidden(participant: Participant) -> str:
    addresses = [text for text in (participant.address, participant.store_address) if text]
    literal = next(filter(_is_literal_loopback, addresses), None)
    if literal is not None:
        return f"a loopback ({literal})"
    return f"a name that is a loopback on its own host ({addresses[0]})"


@lru_cache(maxsize=4096)  # a group joins by the same addresses again and again
def _is_literal_loopback(text: str) -> bool:
    return parse_address(text, "address").is_loopback
