"""The lighthouse's page over its own HTTP side, in this process, with a status that a test makes up."""

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from examples.ports import free_port
from lighthouse import dashboard
from lighthouse.job.progress import Pace
from lighthouse.server.daemon import PAGE_HEADERS
from lighthouse_protocol.messages.status import LighthouseStatus
from lighthouse_protocol.refusals import UnknownName
from lighthouse_runtime.security.access import Access, LoopbackAccess
from lighthouse_runtime.server.grpc_server import Call
from lighthouse_runtime.web.control import HttpControl, HttpGuard, Order
from lighthouse_runtime.web.server import Document, HttpServer, HttpSide
from tests.lighthouse.statuses import status

ROUTES = ("POST /kill", "POST /drain", "POST /stop", "POST /resume", "POST /stacks")


@dataclass
class FakeLighthouse:
    """`pace`: by job; `acted`: what was asked for, by route; `refusal`: how an act is answered; `gathered`: what stacks
    are answered with."""

    shown: LighthouseStatus = field(default_factory=status)
    access: Access = field(default_factory=LoopbackAccess)
    pace: dict[str, Pace] = field(default_factory=dict)
    acted: list[tuple[str, Order]] = field(default_factory=list)
    gathered: dict[str, object] = field(default_factory=dict)
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
        guard = HttpGuard(self.access)
        control = HttpControl(guard, {route: functools.partial(self.act, route) for route in ROUTES})
        side = HttpSide(lambda: True, lambda: (b"", ""), self.status, guard, page, control, self.incident)
        self._http = HttpServer(side)
        self.port = await self._http.start(f"127.0.0.1:{self.port or free_port()}")

    async def stop(self) -> None:
        await self._http.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def status(self) -> dict[str, Any]:
        shown = {name: getattr(self.shown, name) for name in LighthouseStatus.__slots__}
        return {**shown, "now_unix_s": time.time(), "pace": self.pace}

    async def act(self, route: str, order: Order, call: Call) -> Mapping[str, object]:
        if self.refusal is not None:
            raise self.refusal
        self.acted.append((route, order))
        return self.gathered

    def incident(self, name: str, call: Call) -> object:
        if name not in self.incidents:
            raise UnknownName(f"no incident {name!r}")
        return self.incidents[name]
