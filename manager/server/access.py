"""Who may ask a manager. Its calls are those of its own ranks and supervisors: a vote, a request, a watch decide what
the whole group does.

1. A group has a secret, where a supervisor or rank 0 has started its manager, or LIGHTHOUSE_MANAGER_SECRET is set. Then
   only callers that show it act for the group, from wherever they call.
2. Without one, callers of this host do, as torchft's clients and those of the documented service; no other host's.
3. A caller that may not act for the group may learn that a manager is there, and ask what peers that heal ask
   (service.py says to whom that is answered).
"""

import os
import re
from collections.abc import Mapping

from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_protocol.rules.access import Principal, Role
from lighthouse_protocol.rules.proof import is_same
from lighthouse_runtime.security.access import LOCAL, Caller, LocalOperates

GROUP = Principal("the group", frozenset({Role.OPERATE}))
HOST = Principal("this host", frozenset({Role.VIEW}))
PEER = Principal("another host", frozenset({Role.PROBE}))

_SECRET = re.compile("[A-Za-z0-9_-]{32,128}")


class GroupAccess(LocalOperates):
    """`secret`: the group's; empty: it has none."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def principal(self, caller: Caller) -> Principal:
        if not self._secret:
            return LOCAL if caller.is_local else PEER
        if is_same(caller.token, self._secret):
            return GROUP
        if caller.token:
            raise NotPermitted(
                f"the caller's secret is not that of this group: ranks and supervisors of a group share one "
                f"{MANAGER_SECRET_VARIABLE}, and no other group has it"
            )
        return HOST if caller.is_local else PEER


def secret_from(variables: Mapping[str, str] = os.environ) -> str:
    """Empty: it is not set. Raises InvalidRequest, naming the variable, for one that is too weak."""
    secret = variables.get(MANAGER_SECRET_VARIABLE, "")
    if secret and not _SECRET.fullmatch(secret):
        raise InvalidRequest(
            f"has {len(secret)} characters; it has 32 to 128 of A-Z a-z 0-9 _ -, as `openssl rand -hex 32` prints them",
            field=MANAGER_SECRET_VARIABLE,
        )
    return secret
