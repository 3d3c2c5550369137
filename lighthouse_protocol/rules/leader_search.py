"""Choice of the lighthouse that a client calls next.

- After a success, the client stays with that lighthouse.
- A follower's refusal may name the leader. The client calls that address next, without a pause. If the named leader
  fails, too, the client ignores further names in this round.
- After any other failure, the client calls the next address of its list at once. It pauses only after all of them have
  failed.
"""

from collections.abc import Sequence

from lighthouse_protocol.identity import Address, parse_target
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, NotLeader


class LeaderSearch:
    """A client's search for the leader. `address` is the lighthouse to call now."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = tuple(addresses)
        self._at = 0
        self._named: Address | None = None
        self._has_followed = False
        self._failed = 0
        self._has_met_follower = False

    @property
    def has_choice(self) -> bool:
        """True if there are several lighthouses. They may share one listed address, for example a load balancer's."""
        return len(self._addresses) > 1 or self._has_met_follower

    @property
    def address(self) -> Address:
        return self._named or self._addresses[self._at]

    def mark_served(self) -> None:
        """Record a successful call. The client stays with `address`."""
        self._failed, self._has_followed = 0, False

    def mark_failed(self, error: LighthouseError) -> bool:
        """Record a failed call and set `address` to the next lighthouse to try.

        Returns:
            True if all addresses have failed, so the caller should pause before the next call.
        """
        self._has_met_follower |= isinstance(error, NotLeader)
        named = None if self._has_followed else _leader(error)
        if named is not None and named != self.address:
            self._has_followed = True
            if named in self._addresses:
                self._at, self._named = self._addresses.index(named), None
            else:
                self._named = named
            return False
        if self._named is None:
            self._at = (self._at + 1) % len(self._addresses)
        self._named = None
        self._failed += 1
        if self._failed < len(self._addresses):
            return False
        self._failed, self._has_followed = 0, False
        return True


def _leader(error: LighthouseError) -> Address | None:
    if not isinstance(error, NotLeader) or not error.leader:
        return None
    try:
        return parse_target(error.leader, "leader")
    except InvalidRequest:
        return None
