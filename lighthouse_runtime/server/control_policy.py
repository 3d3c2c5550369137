"""Which callers may kill, drain and stop."""

import hmac
from dataclasses import dataclass

from lighthouse_protocol.limits import TOKEN_METADATA_KEY
from lighthouse_protocol.refusals import NotPermitted
from lighthouse_runtime.server.rpc_handler import Call


@dataclass(frozen=True, slots=True)
class ControlPolicy:
    """Callers on loopback, callers with the token; all, if so configured."""

    token: str | None = None
    allow_remote: bool = False

    def check(self, call: Call) -> None:
        """Raises NotPermitted that names the remedies."""
        given = call.metadata.get(TOKEN_METADATA_KEY, "")
        if self.allow_remote or call.is_local:
            return
        if self.token and hmac.compare_digest(given.encode(), self.token.encode()):
            return
        raise NotPermitted(
            f"control from {call.peer} is refused: ask from the daemon's own host, give the token of its "
            "--control-token-file, or start it with --allow-remote-control"
        )
