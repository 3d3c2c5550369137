"""A rank that waits for the other ranks of its group: seen by its manager, and told which of them are missing."""

import logging
import secrets
import threading
from typing import Self

from agent_client.manager_client.votes import VoteChannel
from agent_client.manager_client.watch import RankWatch
from agent_client.progress.progress import Progress
from lighthouse_runtime.client.manager import ManagerClient

log = logging.getLogger(__name__)

LOOKED_EVERY_S = 1.0


class Presence:
    """A context manager, whose end closes the watch that `show` has opened.

    The Agent's own watch, of the same `rank_incarnation`, takes its place. `meeting_place` is where the ranks of the
    group find each other.
    """

    def __init__(self, group_rank: int, meeting_place: str) -> None:
        self.rank_incarnation = secrets.token_hex(6)
        self._group_rank = group_rank
        self._meeting_place = meeting_place
        self._closed = threading.Event()
        self._client: ManagerClient | None = None
        self._watch: RankWatch | None = None

    def show(self, manager_address: str) -> None:
        """Returns within a few seconds, also if the manager does not answer: the request for a quorum reports that."""
        progress = Progress()
        progress.waiting_for("the other ranks of its group").__enter__()
        self._client = ManagerClient(manager_address)
        self._watch = RankWatch(
            self._client,
            self._group_rank,
            self.rank_incarnation,
            VoteChannel(),
            lambda *_: None,
            lambda _: None,
            progress,
        )
        self._watch.ensure_open(wait_for_ready=True)
        threading.Thread(target=self._log, args=(self._watch,), name="lighthouse presence", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._watch is not None:
            self._watch.give_up()
        if self._client is not None:
            self._client.close()

    def _log(self, watch: RankWatch) -> None:
        """Each change of what the manager says is missing."""
        told = ""
        while not self._closed.wait(LOOKED_EVERY_S):
            if watch.waiting_for not in ("", told):
                told = watch.waiting_for
                log.warning("rank %d waits for the group at %s: %s", self._group_rank, self._meeting_place, told)
