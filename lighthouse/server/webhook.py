"""Posts preemption notices to a URL, so that a scheduler or script can start replacements in advance."""

import asyncio
import logging
import time
from dataclasses import asdict

from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.loop import start_part
from lighthouse_runtime.timing.pacing import Backoff
from lighthouse_runtime.web.webhook import post_json, shown_url

log = logging.getLogger(__name__)

POSTED_WITHIN_S = 60.0
MAX_PENDING = 10_000  # the cloud may reclaim the hosts of all groups at once
MAX_OPEN = 32  # requests at a time


class PreemptionWebhook:
    """Posts notices as JSON, MAX_OPEN at a time. Repeats a failed request for up to POSTED_WITHIN_S, then logs it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._shown = shown_url(url)
        self._turns = asyncio.Semaphore(MAX_OPEN)
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, job: str, replica_id: str, notice: PreemptionNotice) -> None:
        """Post a notice in the background. If MAX_PENDING posts are pending, log an error instead."""
        if len(self._tasks) >= MAX_PENDING:
            log.error("%s: %d requests are pending; the notice of %s is not posted", self._shown, MAX_PENDING,
                      replica_id, extra=event("webhook_full"))  # fmt: skip
            return
        task = start_part(self._post(job, replica_id, notice), "a request to --on-preemption", None)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the pending requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _post(self, job: str, replica_id: str, notice: PreemptionNotice) -> None:
        backoff, error = Backoff(), "earlier requests were not answered in time"
        try:
            async with asyncio.timeout(POSTED_WITHIN_S):
                while error:
                    async with self._turns:
                        error = await post_json(self._url, _document(job, replica_id, notice))
                    if error:
                        await backoff.wait()
        except TimeoutError:
            log.error("the notice of %s was not posted to %s within %g s: %s; check --on-preemption",
                      replica_id, self._shown, POSTED_WITHIN_S, error, extra=event("webhook_failed"))  # fmt: skip


def _document(job: str, replica_id: str, notice: PreemptionNotice) -> dict[str, object]:
    return {"job": job, "replica_id": replica_id, **asdict(notice), "left_s": notice.left_s(time.time())}
