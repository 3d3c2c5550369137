"""Typed clients of the lighthouse and of managers, synchronous and asyncio, with one method per RPC. No torch.

Every method takes `timeout_s`. On failure it raises an exception of lighthouse_protocol/refusals.py. A client belongs
to one job and one run, which it sends as metadata. Opening the first stream imports client/streams.py.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from lighthouse_protocol.coordinator import Coordinator, LeaderSearch, parse_coordinator
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, NotLeader, Unreachable, WrongProtocol
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.connection import AsyncClient, Method, SyncClient, metadata_of
from lighthouse_runtime.client.rpcs import Rpc
from lighthouse_runtime.security.client_tls import files_from

if TYPE_CHECKING:
    from lighthouse_protocol.messages.session import WatchHello
    from lighthouse_runtime.client.streams import (
        AsyncRankStream,
        HostStream,
        RankStream,
        Session,
        SupervisorStream,
        Watch,
    )


T = TypeVar("T")

RETRY_S = 0.2
MIN_ATTEMPT_S = 0.05
LONG_CALL_S = 30.0  # a longer call waits for other groups


def _read(lighthouse: str | Coordinator) -> Coordinator:
    # With a text instead of a Coordinator, read the PEM files of the user's own PKI from the environment.
    return lighthouse if isinstance(lighthouse, Coordinator) else parse_coordinator(lighthouse).with_files(files_from())


class _LighthouseMethods:
    quorum = Method(rpcs.join)
    heartbeat = Method(rpcs.heartbeat)
    status = Method(rpcs.lighthouse_status)
    kill = Method(rpcs.lighthouse_kill)
    drain = Method(rpcs.lighthouse_drain)
    incidents = Method(rpcs.incidents)
    incident = Method(rpcs.incident)
    ledger = Method(rpcs.ledger)
    stacks = Method(rpcs.stacks)
    inject = Method(rpcs.inject)
    put_key = Method(rpcs.put_key)
    get_keys = Method(rpcs.get_keys)
    runs = Method(rpcs.runs)
    stop_run = Method(rpcs.stop_run)
    resume_run = Method(rpcs.resume_run)


class LighthouseClient(_LighthouseMethods, SyncClient):
    """Client of a lighthouse, with a method for each operation of the command line, such as `status` and `drain`.

    Every method takes `timeout_s` (seconds). On failure it raises a LighthouseError that gives the reason and the
    remedy. If there are several lighthouses, the client calls the leader. A call that is not answered is repeated at
    another lighthouse until its timeout, so it may take effect twice. A client is a context manager.

    Example:
        ```python
        from agent_client import LighthouseClient

        with LighthouseClient("localhost:29510") as client:
            for job in client.status().jobs:
                print(job.job, job.verdict, job.explanation)
        ```
    """

    def __init__(
        self,
        lighthouse: str | Coordinator,
        *,
        job: str = DEFAULT_JOB,
        run: str = DEFAULT_RUN,
        role: Role = Role.JOIN,
    ) -> None:
        """Create a client. Its first call connects.

        Args:
            lighthouse: Address, several addresses separated by commas, or a join string.
            job: Job on which the calls act.
            run: Run on which the calls act.
            role: Role whose token is read from this user's files if `lighthouse` is a loopback address without a token.
        """
        coordinator = _read(lighthouse)
        self._search = LeaderSearch(coordinator.addresses)
        super().__init__(coordinator.at(self._search.address), metadata_of(job, run), role)

    def invoke(self, rpc: Rpc[T]) -> T:
        ends_at = time.monotonic() + rpc.timeout_s
        attempt = self._attempt(rpc, rpc.timeout_s)
        while True:
            try:
                answer = super().invoke(attempt)
            except (Unreachable, DeadlinePassed) as e:
                if not self._prepare_retry(e, ends_at):
                    raise
                attempt = self._attempt(rpc, ends_at - time.monotonic())
            else:
                self._search.mark_served()
                return answer

    def rank(self, *, wait_for_ready: bool = False) -> "RankStream":
        """Open the stream between a rank and the lighthouse. The first message sent must be a RankHello."""
        from lighthouse_runtime.client.streams import RANK

        stream = self.open(RANK, wait_for_ready and not self._search.has_choice)
        stream.on_failure(self._stream_failed)
        return stream

    def _attempt(self, rpc: Rpc[T], left_s: float) -> Rpc[T]:
        # An unresponsive server must leave time for another attempt, except in calls that wait for other groups.
        left_s = max(MIN_ATTEMPT_S, left_s)
        if not self._search.has_choice:
            return replace(rpc, timeout_s=left_s)
        timeout_s = left_s if rpc.timeout_s > LONG_CALL_S else max(MIN_ATTEMPT_S, left_s / 2)
        return replace(rpc, timeout_s=timeout_s, wait_for_ready=False)

    def _prepare_retry(self, error: LighthouseError, ends_at: float) -> bool:
        """Switch to the next address to retry a call that failed. Pause if all addresses have failed.

        Return False if a retry cannot help, or cannot finish before `ends_at` (a time.monotonic() value).
        """
        if isinstance(error, WrongProtocol) or not (self._search.has_choice or isinstance(error, NotLeader)):
            return False
        waits = self._search.mark_failed(error)
        self._move(self._search.address)
        left_s = ends_at - time.monotonic() - (RETRY_S if waits else 0.0)
        if left_s <= MIN_ATTEMPT_S:
            return False
        if waits:
            time.sleep(RETRY_S)
        return True

    def _stream_failed(self, error: LighthouseError) -> None:
        """Switch to the next address, for later streams and calls, if the server was unreachable."""
        if isinstance(error, Unreachable):
            self._search.mark_failed(error)
            self._move(self._search.address)


class AsyncLighthouseClient(_LighthouseMethods, AsyncClient):
    """Client of a lighthouse for asyncio. It has the methods of LighthouseClient as coroutines.

    Unlike LighthouseClient, it does not search for the leader.
    """

    def __init__(
        self,
        lighthouse: str | Coordinator,
        *,
        job: str = DEFAULT_JOB,
        run: str = DEFAULT_RUN,
        role: Role = Role.JOIN,
    ) -> None:
        super().__init__(_read(lighthouse), metadata_of(job, run), role)

    def session(self, *, wait_for_ready: bool = False) -> "Session":
        """Open a session, the stream between a manager and the lighthouse. The first message sent must be a Hello."""
        from lighthouse_runtime.client.streams import SESSION

        return self.open(SESSION, wait_for_ready)

    def rank(self, *, wait_for_ready: bool = False) -> "AsyncRankStream":
        """Open the stream between a rank and the lighthouse. The first message sent must be a RankHello."""
        from lighthouse_runtime.client.streams import RANK

        return self.open(RANK, wait_for_ready)

    def supervise(self, *, wait_for_ready: bool = False) -> "SupervisorStream":
        """Open the stream between a supervisor and the lighthouse. The first message sent must be a SupervisorHello."""
        from lighthouse_runtime.client.streams import SUPERVISE

        return self.open(SUPERVISE, wait_for_ready)


# Clients of a manager.


class _ManagerMethods:
    quorum = Method(rpcs.quorum)
    checkpoint_address = Method(rpcs.checkpoint_address)
    should_commit = Method(rpcs.should_commit)
    vote = Method(rpcs.vote)
    report = Method(rpcs.report)
    kill = Method(rpcs.manager_kill)
    torchft_kill = Method(rpcs.torchft_manager_kill)
    status = Method(rpcs.manager_status)


def manager_at(address: str, secret: str = "") -> Coordinator:
    """Parse a manager's address, which is host:port or a join string whose token is the group's secret.

    A `secret` that is not empty replaces that token.
    """
    return parse_coordinator(address, "address", None).with_token(secret)


class ManagerClient(_ManagerMethods, SyncClient):
    """Client of a replica group's manager, with a method for each of the manager's RPCs.

    Every method takes `timeout_s` (seconds) and raises a LighthouseError on failure.

    Example:
        ```python
        from agent_client import ManagerClient

        with ManagerClient("localhost:29512") as client:
            print(client.status().step)
        ```
    """

    def __init__(self, address: str, secret: str = "") -> None:
        """Create a client. Its first call connects.

        Args:
            address: host:port of the manager.
            secret: Secret of the group (LIGHTHOUSE_MANAGER_SECRET). `status` does not need it on the manager's host.
        """
        super().__init__(manager_at(address, secret), ())

    def watch(self, request: "WatchHello", *, wait_for_ready: bool = False) -> "Watch":
        """Open a rank's watch, the stream on which the manager sends it quorum events.

        If the watch closes and the rank has not sent Leaving, the manager counts the rank as lost.
        """
        from lighthouse_runtime.client.streams import WATCH

        watch = self.open(WATCH, wait_for_ready)
        watch.send(request)
        return watch


class AsyncManagerClient(_ManagerMethods, AsyncClient):
    """Client of a group's manager for asyncio. It has the methods of ManagerClient as coroutines."""

    def __init__(self, address: str, secret: str = "") -> None:
        super().__init__(manager_at(address, secret), ())

    def host(self) -> "HostStream":
        """Open the stream of a supervisor on another host of the group. The first message sent must be a HostHello."""
        from lighthouse_runtime.client.streams import NODE

        return self.open(NODE)
