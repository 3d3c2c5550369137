"""A lighthouse that other hosts reach: TLS, tokens, an audit."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.security.credentials import Tokens, load_or_make
from tests.processes import LOCALHOST, Lighthouse

CALLS_OF_A_RANK: dict[str, Callable[[Any], Any]] = {
    "Quorum": lambda client: client.quorum(0, 7, "http://stranger:1", timeout_s=5),
    "ShouldCommit": lambda client: client.should_commit(0, 7, True, timeout_s=5),
    "Report": lambda client: client.report(0, "i", "a stranger says so", ends_group=True, timeout_s=5),
    "Kill": lambda client: client.kill("a stranger says so", timeout_s=5),
}
"""Of a manager, as a stranger makes them."""
EVERYWHERE = ("--bind", "[::]:0", "--http", "[::]:0")


class OverTls:
    """A lighthouse that is asked over HTTPS, and what it has noted of its callers."""

    cookie = ""

    def __init__(self, lighthouse: Lighthouse, folder: Path) -> None:
        self.lighthouse = lighthouse
        self.folder = folder

    @property
    def audit(self) -> list[dict[str, Any]]:
        """Its file is there from the first entry on."""
        paths = (self.folder.parent / name for name in ("audit.jsonl", "audit.refused.jsonl"))
        lines = (line for path in paths if path.exists() for line in path.read_text().splitlines())
        return sorted(map(json.loads, lines), key=lambda entry: entry["time"])

    def ask(self, path: str, body: bytes | None, headers: dict[str, str], context: ssl.SSLContext) -> tuple[int, str]:
        given = headers if body is None else {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(f"https://localhost:{self.lighthouse.http_port}{path}", body, given)
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=60) as answer:
                self.cookie = answer.headers.get("Set-Cookie", "")
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()


class Secured(OverTls):
    """A lighthouse on all addresses, and its credentials."""

    def __init__(self, lighthouse: Lighthouse, folder: Path) -> None:
        super().__init__(lighthouse, folder)
        self.pin = load_or_make(folder, ()).ca_pin

    def coordinator(self, role: Role | None, host: str = LOCALHOST) -> Coordinator:
        """None: the pin alone, as a stranger could learn it."""
        token = "" if role is None else Tokens.read(self.folder).newest(role)
        return Coordinator((Address(host, self.lighthouse.port),), self.pin, token)

    def join_string(self, role: Role, host: str = LOCALHOST) -> str:
        return self.coordinator(role, host).join_string()

    def get(self, path: str, token: str = "", **headers: str) -> tuple[int, str]:
        return self.ask(path, None, headers | _bearer(token), self._context())

    def post(self, path: str, body: object, token: str = "", **headers: str) -> tuple[int, str]:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask(path, sent, headers | _bearer(token), self._context())

    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=(self.folder / "ca.pem").read_text())


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
