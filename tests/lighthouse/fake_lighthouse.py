"""The lighthouse's page over its own HTTP side, in this process, with a status that a test makes up."""

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from examples.ports import free_port
from lighthouse import dashboard
from lighthouse.server.daemon import PAGE_HEADERS
from lighthouse_protocol.messages.status import LighthouseStatus
from lighthouse_protocol.refusals import UnknownName
from lighthouse_runtime.server.control_policy import ControlPolicy
from lighthouse_runtime.server.rpc_handler import Call
from lighthouse_runtime.web.control import HttpControl, KillOrder
from lighthouse_runtime.web.server import Document, HttpServer, HttpSide
from tests.lighthouse.statuses import status


@dataclass
class FakeLighthouse:
    """`killed`: what was asked for; `refusal`: how a kill is answered."""

    shown: LighthouseStatus = field(default_factory=status)
    policy: ControlPolicy = field(default_factory=ControlPolicy)
    killed: list[KillOrder] = field(default_factory=list)
    refusal: Exception | None = None
    incidents: dict[str, object] = field(default_factory=dict)
    port: int = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.stop()

    async def start(self) -> None:
        """On the same port as before, if there was one."""
        page = Document(dashboard.page(), "text/html", PAGE_HEADERS)
        control = HttpControl(self.policy, self.kill)
        side = HttpSide(lambda: True, lambda: (b"", ""), self.status, page, control, self.incident)
        self._http = HttpServer(side)
        self.port = await self._http.start(f"127.0.0.1:{self.port or free_port()}")

    async def stop(self) -> None:
        await self._http.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def status(self) -> dict[str, Any]:
        shown = {name: getattr(self.shown, name) for name in LighthouseStatus.__slots__}
        return {**shown, "now_unix_s": time.time()}

    async def kill(self, order: KillOrder, call: Call) -> None:
        self.policy.check(call)
        if self.refusal is not None:
            raise self.refusal
        self.killed.append(order)

    def incident(self, name: str) -> object:
        if name not in self.incidents:
            raise UnknownName(f"id: there is no incident {name!r}")
        return self.incidents[name]
