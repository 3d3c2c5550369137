"""The manager's side of the lighthouse: heartbeats and joins, over one connection that comes back by itself."""

import asyncio
import logging
import random

from lighthouse_runtime.clients import AsyncLighthouseClient
from protos.limits import answer_margin_s
from protos.membership import Participant, Quorum
from protos.refusals import DeadlinePassed, LighthouseError, Superseded, Unreachable

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


class Backoff:
    """Grows from FIRST_BACKOFF_S to MAX_BACKOFF_S, with jitter."""

    def __init__(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    async def wait(self, at_most_s: float) -> None:
        delay = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(MAX_BACKOFF_S, 2 * self._next_s)
        await asyncio.sleep(min(delay, max(0.0, at_most_s)))


class LighthouseLink:
    def __init__(self, client: AsyncLighthouseClient, replica_id: str, heartbeat_interval_s: float) -> None:
        self._client = client
        self._replica_id = replica_id
        self._interval_s = heartbeat_interval_s
        self.incarnation = ""
        self.error = "not connected yet"
        self._was_reachable: bool | None = None

    @property
    def address(self) -> str:
        return self._client.address

    @property
    def is_reachable(self) -> bool:
        return not self.error

    async def beat(self) -> None:
        """Heartbeats until cancelled."""
        while True:
            try:
                await self._client.heartbeat(self._replica_id, self.incarnation, timeout_s=max(1.0, self._interval_s))
                self._note("")
            except LighthouseError as e:
                self._note(str(e))
            await asyncio.sleep(self._interval_s)

    async def join(self, participant: Participant, time_left_s: float) -> Quorum:
        """The next quorum with this group in it; waits for a lighthouse that is away.

        Raises a refusal with its reason a little before the time is over, or at once if the lighthouse refuses.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + time_left_s - answer_margin_s(time_left_s)
        backoff = Backoff()
        while True:
            try:
                timeout_s = max(0.001, ends_at - loop.time())
                quorum = await self._client.quorum(participant, timeout_s=timeout_s, wait_for_ready=False)
                self._note("")
                return quorum
            except (Unreachable, Superseded) as e:
                self._note(str(e))
                if loop.time() + FIRST_BACKOFF_S >= ends_at:
                    raise Unreachable(f"lighthouse: {e}; tried for {time_left_s:.3g} s") from None
            except DeadlinePassed as e:
                raise DeadlinePassed(f"lighthouse: {e}") from None
            await backoff.wait(ends_at - loop.time())

    async def close(self) -> None:
        await self._client.close()

    def _note(self, error: str) -> None:
        if self._was_reachable is not (not error):
            self._was_reachable = not error
            if error:
                log.warning("lighthouse lost: %s", error)
            else:
                log.info("lighthouse at %s answers", self._client.address)
        self.error = error
