"""Which of several lighthouses to ask next. Rules:

- The one that has served last is asked until it fails.
- One that does not lead may name the leader: that one is asked next, at once. A name that leads nowhere counts once.
- Else the next one of the list is asked, at once; after all of them have failed, the caller waits before it goes on.
"""

from collections.abc import Sequence

from lighthouse_protocol.identity import Address, parse_target
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, NotLeader


class LeaderSearch:
    """`address` is the one to ask now."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = tuple(addresses)
        self._at = 0
        self._named: Address | None = None
        self._has_followed = False
        self._failed = 0
        self._has_met_follower = False

    @property
    def has_choice(self) -> bool:
        """There are several: by the list, or because one has said that it does not lead (a name may have several
        addresses)."""
        return len(self._addresses) > 1 or self._has_met_follower

    @property
    def address(self) -> Address:
        return self._named or self._addresses[self._at]

    def served(self) -> None:
        """It leads: by whatever name it was found, it is asked again."""
        self._failed, self._has_followed = 0, False

    def failed(self, error: LighthouseError) -> bool:
        """`address` did not serve. Whether to wait before the next one is asked."""
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
