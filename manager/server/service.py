"""gRPC service of a manager, and the rules for access to it.

`ManagerService` serves the documented service (with and without its package name) and torchft's on one port. The
handlers translate messages for the group's driver. `GroupAccess` decides which callers may act for the group.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from lighthouse_protocol.constraints import check_count, check_quorum_id, check_short
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE, cut_reason
from lighthouse_protocol.messages.membership import CatchUp, Decision, Quorum, Tag
from lighthouse_protocol.messages.session import FromRank, WatchHello
from lighthouse_protocol.messages.status import ManagerStatus
from lighthouse_protocol.pb.documented import manager_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted, Unrecoverable, WrongState
from lighthouse_protocol.rules.access import Principal, Role, is_same
from lighthouse_protocol.wire import documented as wire
from lighthouse_protocol.wire.codec import MANAGER_STATUS
from lighthouse_protocol.wire.streams import WATCH_REQUESTS, WATCH_RESPONSES
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.children import ended_process, host_id
from lighthouse_runtime.security.access import LOCAL, Caller, LocalOperatorAccess
from lighthouse_runtime.server.grpc_server import Call, Entry, FutureReply, Method, Stream
from lighthouse_runtime.server.streams import FIRST_WITHIN_S, Frames, Requests, Sender, StreamPeer
from manager.group.driver import Answer, GroupDriver
from manager.group.events import Killed

log = logging.getLogger(__name__)


REFLECTED = ("manager.v1.ManagerService", "torchft.ManagerService")
MAX_CHECKPOINT_ADDRESS_CHARS = 4096
TO_RANKS = Frames(WATCH_RESPONSES.write)
ACTS = frozenset({Role.OPERATE})  # roles of the group's own ranks; other callers must prove that they are peers

T = TypeVar("T")


class ManagerService:
    def __init__(
        self,
        driver: GroupDriver,
        status: Callable[[], ManagerStatus],
        watch_within_s: float = FIRST_WITHIN_S,
        more: Mapping[str, Entry] | None = None,
    ) -> None:
        """Create the service.

        `status` returns the answer to the Status RPC. `watch_within_s` is the time limit for the first message of a
        watch stream. `more` contains the handlers of a supervisor's additional RPCs, by method name.
        """
        self._driver = driver
        self._status = status
        self._watch_within_s = watch_within_s
        self._more = dict(more or {})

    def services(self) -> Mapping[str, Mapping[str, Entry]]:
        """Return the RPC handlers, by service name and method name."""
        documented: dict[str, Entry] = {
            "Quorum": Method(manager_pb2.ManagerQuorumRequest, self.quorum),
            "CheckpointAddress": Method(manager_pb2.CheckpointAddressRequest, self.checkpoint_address),
            "ShouldCommit": Method(manager_pb2.ShouldCommitRequest, self.should_commit),
            "Kill": Method(manager_pb2.KillRequest, self.kill),
            "Status": Method(manager_pb2.ManagerStatusRequest, self.status),
            "Report": Method(manager_pb2.ReportRequest, self.report),
            "Watch": Stream(WATCH_REQUESTS, self.watch),
            **self._more,
        }
        torchft: dict[str, Entry] = {
            "Quorum": Method(torchft_pb2.ManagerQuorumRequest, self.torchft_quorum),
            "CheckpointMetadata": Method(torchft_pb2.CheckpointMetadataRequest, self.torchft_checkpoint_metadata),
            "ShouldCommit": Method(torchft_pb2.ShouldCommitRequest, self.torchft_should_commit),
            "Kill": Method(torchft_pb2.KillRequest, self.torchft_kill),
        }
        return {
            "manager.v1.ManagerService": documented,
            "ManagerService": documented,
            "torchft.ManagerService": torchft,
        }

    async def quorum(self, request: manager_pb2.ManagerQuorumRequest, call: Call) -> manager_pb2.ManagerQuorumResponse:
        rank_incarnation = _check_text(request.rank_incarnation, "rank_incarnation")
        assignment, _ = await self._ask(
            call,
            is_agent=bool(rank_incarnation),
            group_rank=request.rank,
            step=request.step,
            checkpoint_address=_check_text(request.checkpoint_server_addr, "checkpoint_server_addr"),
            tag_quorum_id=_optional_quorum_id(request, "tag_quorum_id"),
            rank_incarnation=rank_incarnation,
            shrink_only=request.shrink_only,
            init_sync=request.init_sync if request.HasField("init_sync") else True,
            commit_failures=check_count(request.commit_failures, "commit_failures"),
            catch_up=_catch_up(request),
            compares=request.compares,
            distrust=wire.distrust_from_native(request),
            heals_first=request.heals_first if request.HasField("heals_first") else None,
        )
        return wire.assignment_to_native(assignment)

    async def torchft_quorum(
        self, request: torchft_pb2.ManagerQuorumRequest, call: Call
    ) -> torchft_pb2.ManagerQuorumResponse:
        assignment, quorum = await self._ask(
            call,
            is_agent=False,
            group_rank=request.group_rank,
            step=request.step,
            checkpoint_address=_check_text(request.checkpoint_metadata, "checkpoint_metadata"),
            shrink_only=request.shrink_only,
            init_sync=request.init_sync,
            commit_failures=check_count(request.commit_failures, "commit_failures"),
            handle=_check_text(request.reconfigure_handle, "reconfigure_handle"),
        )
        return wire.assignment_to_torchft(assignment, _handles(quorum, request.group_rank))

    async def _ask(self, call: Call, *, is_agent: bool, **fields: Any) -> Answer:
        """Pass a rank's request for a quorum to the driver, and wait for the answer.

        `fields` are arguments of `GroupDriver.ask`. If the group cannot continue because its ranks hold different
        states, an Agent receives Unrecoverable, which makes its process exit. Other clients receive WrongState.
        """
        reply = FutureReply[Answer]()
        try:
            return await self._wait(self._driver.ask(reply, call.require_deadline(), **fields), reply)
        except Unrecoverable as e:
            raise e if is_agent else WrongState(str(e)) from None

    async def _vote(self, call: Call, **fields: Any) -> Decision:
        reply = FutureReply[Decision]()
        return await self._wait(self._driver.vote(reply, call.require_deadline(), **fields), reply)

    async def _wait(self, number: int, reply: FutureReply[T]) -> T:
        try:
            return await reply.value
        finally:
            self._driver.end_call(number)

    async def checkpoint_address(
        self, request: manager_pb2.CheckpointAddressRequest, call: Call
    ) -> manager_pb2.CheckpointAddressResponse:
        if not call.principal.is_allowed(ACTS):
            self._driver.check_peer(request.rank, request.quorum_id, request.proof)
        step = request.step if request.HasField("step") else None
        address = self._driver.checkpoint_address(request.rank, step)
        return manager_pb2.CheckpointAddressResponse(checkpoint_server_address=address)

    async def torchft_checkpoint_metadata(
        self, request: torchft_pb2.CheckpointMetadataRequest, call: Call
    ) -> torchft_pb2.CheckpointMetadataResponse:
        if not call.principal.is_allowed(ACTS):
            self._driver.check_peer(request.rank, 0, "")
        metadata = self._driver.checkpoint_address(request.rank, None)
        return torchft_pb2.CheckpointMetadataResponse(checkpoint_metadata=metadata)

    async def should_commit(
        self, request: manager_pb2.ShouldCommitRequest, call: Call
    ) -> manager_pb2.ShouldCommitResponse:
        vote = await self._vote(
            call,
            wants_next=request.wants_next,
            group_rank=request.rank,
            step=request.step,
            vote=request.should_commit,
            quorum_id=request.quorum_id if request.HasField("quorum_id") else None,
        )
        return wire.vote_to_native(vote)

    async def torchft_should_commit(
        self, request: torchft_pb2.ShouldCommitRequest, call: Call
    ) -> torchft_pb2.ShouldCommitResponse:
        vote = await self._vote(call, group_rank=request.group_rank, step=request.step, vote=request.should_commit)
        return torchft_pb2.ShouldCommitResponse(should_commit=vote.commit)

    async def kill(self, request: manager_pb2.KillRequest, call: Call) -> manager_pb2.KillResponse:
        self._kill(request.msg, call)
        return manager_pb2.KillResponse()

    async def torchft_kill(self, request: torchft_pb2.KillRequest, call: Call) -> torchft_pb2.KillResponse:
        self._kill(request.msg, call)
        return torchft_pb2.KillResponse()

    async def status(self, _: manager_pb2.ManagerStatusRequest, __: Call) -> manager_pb2.ManagerStatusResponse:
        return MANAGER_STATUS.write(self._status())

    async def report(self, request: manager_pb2.ReportRequest, _: Call) -> manager_pb2.ReportResponse:
        reason = cut_reason(request.reason)
        rank_incarnation = _check_text(request.rank_incarnation, "rank_incarnation")
        reason = reason or "no reason given"
        if request.drains:
            self._driver.drain_for(request.rank, rank_incarnation, reason)
        else:
            self._driver.report_rank_failure(request.rank, rank_incarnation, reason, ends_group=request.ends_group)
        return manager_pb2.ReportResponse()

    async def watch(self, requests: Requests[FromRank], call: Call, sender: Sender) -> None:
        """Serve a rank's watch stream (signs of life, progress, votes) until the stream or the rank's process ends."""
        hello = await requests.read_hello(WatchHello, self._watch_within_s)
        if hello is None:
            return
        is_local = call.is_local and hello.host == host_id()
        driver = self._driver
        number = driver.open_watch(hello, StreamPeer(sender, TO_RANKS), is_local=is_local)
        try:
            with ended_process(hello.pid if is_local else 0, hello.started, lambda: driver.end_watch(number)):
                async for message in requests:
                    driver.receive(number, message)
        finally:
            driver.end_watch(number)

    def _kill(self, msg: str, call: Call) -> None:
        reason = cut_reason(msg) or "no reason given"
        log.error("killed by %s: %s", call.caller, reason, extra=event("killed", peer=call.caller, reason=reason))
        self._driver.kill(Killed(reason))


def _check_text(text: str, field: str) -> str:
    return check_short(text, field, MAX_CHECKPOINT_ADDRESS_CHARS)


def _optional_quorum_id(
    request: manager_pb2.ManagerQuorumRequest, field: Literal["tag_quorum_id", "held_quorum_id"]
) -> int | None:
    return check_quorum_id(getattr(request, field), field) if request.HasField(field) else None


def _catch_up(request: manager_pb2.ManagerQuorumRequest) -> CatchUp:
    held = None
    if request.HasField("held_step"):
        held = Tag(check_count(request.held_step, "held_step"), _optional_quorum_id(request, "held_quorum_id"))
    return CatchUp(request.catch_up, held, request.has_source)


def encode_handles(handles: tuple[str, ...]) -> bytes:
    """Encode the ranks' reconfigure handles as a torchft QuorumMember. Return empty bytes if all are empty."""
    if not any(handles):
        return b""
    return torchft_pb2.QuorumMember(reconfigure_handles=handles).SerializeToString()


def _handles(quorum: Quorum | None, group_rank: int) -> list[str]:
    """Return each participant's handle for `group_rank`, or [] if there is no quorum or a handle is missing."""
    if quorum is None:
        return []
    shown = [torchft_pb2.QuorumMember.FromString(p.wire).reconfigure_handles for p in quorum.participants]
    return [handles[group_rank] for handles in shown] if all(len(h) > group_rank for h in shown) else []


# -- access
#
# Votes, requests and watches affect the whole group, so a manager accepts them only from its own ranks and supervisors.
#
# 1. If a supervisor or rank 0 started the manager, or if LIGHTHOUSE_MANAGER_SECRET is set, the group has a secret. Only
#    callers with this secret may act for the group. They may be on any host.
# 2. If the group has no secret, all callers on this host may act for the group, such as torchft's clients.
# 3. Other callers may only check that a manager is running, and send the requests of healing peers, which
#    ManagerService checks.

GROUP = Principal("the group", frozenset({Role.OPERATE}))
HOST = Principal("this host", frozenset({Role.VIEW}))
PEER = Principal("another host", frozenset({Role.PROBE}))

_SECRET = re.compile("[A-Za-z0-9_-]{32,128}")


class GroupAccess(LocalOperatorAccess):
    """Decides who may act for a group: callers that know its secret or, if it has none, callers on this host."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def principal(self, caller: Caller) -> Principal:
        if not self._secret:
            return LOCAL if caller.is_local else PEER
        if is_same(caller.token, self._secret):
            return GROUP
        if caller.token:
            raise NotPermitted(
                f"the caller's secret is not that of this group: ranks and supervisors of a group share one "
                f"{MANAGER_SECRET_VARIABLE}, and no other group has it"
            )
        return HOST if caller.is_local else PEER


def secret_from(variables: Mapping[str, str] = os.environ) -> str:
    """Return the group's secret, or an empty string if LIGHTHOUSE_MANAGER_SECRET is not set.

    Raise InvalidRequest if it is set to anything but 32 to 128 characters from [A-Za-z0-9_-].
    """
    secret = variables.get(MANAGER_SECRET_VARIABLE, "")
    if secret and not _SECRET.fullmatch(secret):
        raise InvalidRequest(
            f"has {len(secret)} characters; use 32 to 128 of A-Z a-z 0-9 _ -, for example from `openssl rand -hex 32`",
            field=MANAGER_SECRET_VARIABLE,
        )
    return secret
