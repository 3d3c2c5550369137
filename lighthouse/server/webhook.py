"""Posts preemption notices to a URL, so that a scheduler or a script can start a replacement before the host ends."""

import asyncio
import logging
import time
from dataclasses import asdict
from urllib.parse import urlsplit

import aiohttp

from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_runtime.log_event import event
from lighthouse_runtime.timing.pacing import Backoff

log = logging.getLogger(__name__)

ANSWERED_WITHIN_S = 5.0
POSTED_WITHIN_S = 60.0
MAX_PENDING = 256
KEPT = 4096


class PreemptionWebhook:
    """Posts each notice once, as JSON. Repeats a failed request for up to POSTED_WITHIN_S, then logs the failure."""

    def __init__(self, url: str) -> None:
        self._url = url
        parts = urlsplit(url)
        self._shown = f"{parts.scheme}://{parts.hostname}"  # the path may contain a secret
        self._posted: dict[tuple[str, str, PreemptionNotice], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, job: str, replica_id: str, notice: PreemptionNotice) -> None:
        """Begin to post a notice, unless the same one was posted before."""
        if (job, replica_id, notice) in self._posted:
            return
        if len(self._tasks) >= MAX_PENDING:
            log.error("%s: %d requests are pending; the notice of %s is not posted", self._shown, MAX_PENDING,
                      replica_id, extra=event("webhook_full"))  # fmt: skip
            return
        self._posted[job, replica_id, notice] = None
        while len(self._posted) > KEPT:
            del self._posted[next(iter(self._posted))]
        task = asyncio.create_task(self._post(job, replica_id, notice), name="webhook")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the pending requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _post(self, job: str, replica_id: str, notice: PreemptionNotice) -> None:
        backoff, error = Backoff(), ""
        try:
            async with asyncio.timeout(POSTED_WITHIN_S), aiohttp.ClientSession() as http:
                while (error := await self._try(http, job, replica_id, notice)) != "":
                    await backoff.wait()
        except TimeoutError:
            log.error("the notice of %s was not posted to %s within %g s: %s; check --on-preemption",
                      replica_id, self._shown, POSTED_WITHIN_S, error, extra=event("webhook_failed"))  # fmt: skip

    async def _try(self, http: aiohttp.ClientSession, job: str, replica_id: str, notice: PreemptionNotice) -> str:
        """Send one request. Return the error as text, or an empty string on success."""
        body = {"job": job, "replica_id": replica_id, **asdict(notice), "left_s": notice.left_s(time.time())}
        try:
            timeout = aiohttp.ClientTimeout(total=ANSWERED_WITHIN_S)
            async with http.post(self._url, json=body, timeout=timeout, allow_redirects=False) as response:
                return "" if response.status < 300 else f"it answered with status {response.status}"
        except TimeoutError:
            return f"it did not answer within {ANSWERED_WITHIN_S:g} s"
        except (aiohttp.ClientError, OSError) as e:
            return f"{type(e).__name__}: {e}".replace(self._url, self._shown)
