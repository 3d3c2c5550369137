"""Paths and message types of all streams. No I/O.

Most commands open no stream and importing this module is slow, so the clients import it when they open one.
"""

from lighthouse_protocol.messages.hosts import FromHost, ToHost
from lighthouse_protocol.messages.run import FromRunRank, FromSupervisor, ToRunRank, ToSupervisor
from lighthouse_protocol.messages.session import FromRank, ToLighthouse, ToManager, ToRank
from lighthouse_protocol.wire import streams
from lighthouse_runtime.client.rpcs import LIGHTHOUSE, MANAGER
from lighthouse_runtime.client.streams import AsyncStream, StreamKind, SyncStream

SESSION = StreamKind(LIGHTHOUSE + "Session", streams.SESSION_REQUESTS, streams.SESSION_RESPONSES)
RANK = StreamKind(LIGHTHOUSE + "Rank", streams.RANK_REQUESTS, streams.RANK_RESPONSES)
SUPERVISE = StreamKind(LIGHTHOUSE + "Supervise", streams.SUPERVISOR_REQUESTS, streams.SUPERVISOR_RESPONSES)
WATCH = StreamKind(MANAGER + "Watch", streams.WATCH_REQUESTS, streams.WATCH_RESPONSES)
NODE = StreamKind(MANAGER + "Node", streams.NODE_REQUESTS, streams.NODE_RESPONSES)

Session = AsyncStream[ToLighthouse, ToManager]
AsyncRankStream = AsyncStream[FromRunRank, ToRunRank]
SupervisorStream = AsyncStream[FromSupervisor, ToSupervisor]
HostStream = AsyncStream[FromHost, ToHost]
Watch = SyncStream[FromRank, ToRank]
RankStream = SyncStream[FromRunRank, ToRunRank]
