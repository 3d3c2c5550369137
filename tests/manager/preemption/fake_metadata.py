"""A metadata service that answers as the documentation of AWS, GCP and Azure says, or wrongly, late or never."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

HTML = "<html><body>Sign in to the network</body></html>"


@dataclass
class Metadata:
    """`answers`: body by path; an absent path is a 404. `broken`: a response for all paths, instead of the true one."""

    answers: dict[str, str] = field(default_factory=dict[str, str])
    broken: str = ""  # html, truncated, 500, redirect, endless, never or no-flavor
    token: str = "token-1"
    tokens_given: int = 0
    requests: list[str] = field(default_factory=list[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    def set(self, path: str, body: str | None) -> None:
        if body is None:
            self.answers.pop(path, None)
        else:
            self.answers[path] = body
        self.changed.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        body = self.answers.get(request.path)
        match self.broken:
            case "html":
                return web.Response(text=HTML, content_type="text/html")
            case "truncated":
                return web.Response(text=(body or '{"action": "terminate"}')[:-5])
            case "500":
                return web.Response(status=500, text="internal error")
            case "redirect":
                return web.Response(status=302, headers={"Location": "http://localhost:1/"})
            case "endless":
                return web.Response(text="x" * 200_000)
            case "never":
                await asyncio.Event().wait()
            case _:
                pass
        if request.path.startswith("/latest/"):
            return self._aws(request, body)
        if request.path.startswith("/computeMetadata/"):
            return await self._gcp(request)
        if request.headers.get("Metadata") != "true":
            return web.Response(status=400, text=HTML)
        return web.Response(status=404) if body is None else web.Response(text=body)

    def _aws(self, request: web.Request, body: str | None) -> web.Response:
        if request.path == "/latest/api/token":
            is_asked_well = request.method == "PUT" and "X-aws-ec2-metadata-token-ttl-seconds" in request.headers
            self.tokens_given += is_asked_well
            return web.Response(text=self.token) if is_asked_well else web.Response(status=405)
        if request.headers.get("X-aws-ec2-metadata-token") != self.token:
            return web.Response(status=401, text=HTML)
        return web.Response(status=404, text=HTML) if body is None else web.Response(text=body)

    async def _gcp(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        etag = f"e{hash(self.answers.get(request.path, 'FALSE')) & 0xFFFF:x}"
        if "wait_for_change" in request.query and request.query.get("last_etag") == etag:
            self.changed.clear()
            await self.changed.wait()
        body = self.answers.get(request.path, "FALSE")
        etag = f"e{hash(body) & 0xFFFF:x}"
        flavor = {} if self.broken == "no-flavor" else {"Metadata-Flavor": "Google"}
        return web.Response(text=body, headers={**flavor, "ETag": etag})


@asynccontextmanager
async def serving() -> AsyncGenerator[Metadata]:
    metadata = Metadata()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", metadata.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    metadata.url = f"http://127.0.0.1:{port}"
    try:
        yield metadata
    finally:
        await runner.cleanup()
