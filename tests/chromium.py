"""A real browser without a window, driven by its DevTools protocol over a web socket.

async with Chromium(folder) as browser, browser.page(url, dark=True) as page:
    await page.until("document.title === 'lighthouse'")
"""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

from tests.processes import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-port=0"
)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def pictures(folder: Path) -> Path:
    """Where a test leaves its screenshots: SCREENSHOTS, or its own temporary folder."""
    chosen = Path(os.environ.get("SCREENSHOTS") or folder)
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


class Page:
    """`errors`: what the console complained of, and what was thrown; `requests`: every address that was asked for."""

    def __init__(self, browser: "Chromium", session: str) -> None:
        self._browser = browser
        self.session = session
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.send(method, params, self.session)

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise's, once it is there."""
        answer = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    async def until(self, script: str, within_s: float = PATIENCE_S) -> None:
        """An expression is true."""
        try:
            async with asyncio.timeout(within_s):
                while not await self.run(f"!!({script})"):  # noqa: ASYNC110 - the page tells of no event
                    await asyncio.sleep(0.05)
        except TimeoutError:
            seen = await self.text()
            raise AssertionError(f"not within {within_s:g} s: {script}; {self.errors}; on the page: {seen}") from None

    async def text(self) -> str:
        """What a person sees, in one line."""
        return " ".join((await self.run("document.body.innerText")).split())

    async def look(self, *, width: int = 1440, height: int = 900, dark: bool = False, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key: str, code: int = 0, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    async def picture(self, path: Path) -> Path:
        shot = await self.send("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))
        return path

    def hear(self, method: str, params: Mapping[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(f"{details['text']} {details.get('exception', {}).get('description', '')}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))


class Chromium:
    """`folder`: for its profile."""

    def __init__(self, folder: Path) -> None:
        self._profile = folder / "profile"
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        assert CHROMIUM is not None
        try:
            await self._start(CHROMIUM)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self, program: str) -> None:
        quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        command = [program, *FLAGS.split(), f"--user-data-dir={self._profile}", "about:blank"]
        process = await asyncio.create_subprocess_exec(*command, start_new_session=True, **quiet)
        self._stack.push_async_callback(_end, process)
        session = await self._stack.enter_async_context(aiohttp.ClientSession())
        port, path = await self._address(process)
        self._socket = await session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0)
        reading = asyncio.create_task(self._read())
        self._stack.push_async_callback(_cancel, reading)
        self._stack.push_async_callback(self._socket.close)

    async def _address(self, process: asyncio.subprocess.Process) -> tuple[str, str]:
        told = self._profile / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert process.returncode is None, f"the browser has ended with {process.returncode}"
                if told.exists() and len(lines := told.read_text().split()) == 2:
                    return lines[0], lines[1]
                await asyncio.sleep(0.05)

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif (page := self._pages.get(told.get("sessionId", ""))) is not None:
                page.hear(told["method"], told["params"])

    async def send(self, method: str, params: Mapping[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(
            {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        )
        async with asyncio.timeout(PATIENCE_S):
            told = await answer
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    @contextlib.asynccontextmanager
    async def page(self, url: str, **look: Any) -> AsyncIterator[Page]:
        target = (await self.send("Target.createTarget", {"url": "about:blank", "newWindow": True}))["targetId"]
        session = (await self.send("Target.attachToTarget", {"targetId": target, "flatten": True}))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.send(f"{domain}.enable")
        await page.look(**look)
        await page.send("Page.navigate", url=url)
        try:
            await page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
            yield page
        finally:
            await self.send("Target.closeTarget", {"targetId": target})


async def _end(process: asyncio.subprocess.Process) -> None:
    """With its helpers, which are of its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
