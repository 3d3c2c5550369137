"""torchrun's RendezvousHandler, implemented over the lighthouse.

A *round* is torchrun's term for one set of nodes that train together. The lighthouse treats the nodes as the ranks of a
run, and each round as a generation of that run.

- Each node has a stream to the lighthouse, which therefore notices a dead node within milliseconds. No node stores
  data for the rendezvous.
- Each round has its own store, on the node with rank 0. That node publishes the store's address as a key of the
  generation. So no node contacts the store of a dead node, and keys of an earlier round are not visible.
- torchrun's agents call `num_nodes_waiting` each time they check their workers (--monitor-interval). Once the round
  has ended, it returns 1, and the agents restart their workers.
"""

import dataclasses
import logging
import os
import secrets
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from agent_client.restart.options import NO_NAME
from agent_client.restart.rules.events import Run
from agent_client.restart.store import until_set
from agent_client.step.environment import Variables
from agent_client.torchrun.node import Node, RoundStore
from lighthouse_protocol.coordinator import parse_coordinator
from lighthouse_protocol.identity import Address, check_name, group_run, parse_address
from lighthouse_protocol.limits import DEFAULT_JOB, MAX_GROUP_WORLD_SIZE, SECRET_BYTES
from lighthouse_protocol.messages.run import KeyKind, RankHello, RankId, RunCompleted, RunStopped, RunTerms
from lighthouse_protocol.refusals import LighthouseError, NotPermitted, UnknownName, Unreachable, WrongState
from lighthouse_runtime.client.clients import LighthouseClient
from lighthouse_runtime.net.address import advertised_host
from lighthouse_runtime.security.client_tls import files_from

log = logging.getLogger(__name__)

STORE_TIMEOUT = timedelta(minutes=5)  # torch's default for a store
CONNECT_TIMEOUT = timedelta(seconds=10)  # limit of each attempt
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.1
MAX_SPARES = 256
_STORE = "torch_store"
_VARIABLE = "LIGHTHOUSE_ADDRESS"

NOT_NEEDED = frozenset(
    {
        "heartbeat_timeout",  # the lighthouse detects a dead node by its broken stream
        "is_host",  # the node with rank 0 serves the store of a round
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "read_timeout",
        "store_type",
        "timeout",  # added by torchrun
    }
)
"""Options of torchrun's own backends. They are accepted and ignored, so that command lines need not be changed."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `--rdzv-conf`. Options that torchrun's own backend also has keep their names and defaults."""

    join_timeout: float = 600.0
    """Time in seconds for which a node waits for a round that includes the node. A spare waits indefinitely."""
    last_call_timeout: float = 30.0
    """Time in seconds for which a round waits for more nodes once the minimum number has joined. After a loss, it waits
    only for live nodes to stop their workers."""
    close_timeout: float = 30.0
    """Time in seconds for which a node tries to report the end of the run to an unreachable lighthouse."""
    connect_timeout: float = 60.0
    """Time in seconds for which a starting node tries to reach the lighthouse."""
    loss_timeout: float = 2.0
    """Time in seconds for which a node whose workers have failed waits for a report that another node was lost. If no
    report arrives, the failure counts against --max-restarts."""

    @classmethod
    def read(cls, given: Mapping[str, object]) -> "Options":
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(given) - known - NOT_NEEDED):
            raise ValueError(f"--rdzv-conf has no option {unknown[0]!r}; its options are {', '.join(sorted(known))}")
        found: dict[str, float] = {}
        for name in filter(known.__contains__, given):
            try:
                found[name] = float(str(given[name]))
            except ValueError:
                found[name] = -1.0
            if not 0 < found[name] < float("inf"):
                raise ValueError(
                    f"--rdzv-conf {name}={given[name]}: must be a number of seconds above 0, for example {name}=30"
                )
        return cls(**found)


class LighthouseRendezvous(RendezvousHandler):
    """torchrun's rendezvous handler for one node. It connects to the lighthouse in the first next_rendezvous()."""

    def __init__(
        self, params: RendezvousParameters, client: LighthouseClient, named_by: str, host: str, options: Options
    ) -> None:
        """Set the parameters, without connecting.

        `named_by` is the option or variable that names the lighthouse, for errors. `host` is the address at which other
        nodes can reach this node.
        """
        self.options = options
        self._params = params
        self._client = client
        self._named_by = named_by
        self._host = host
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._node: Node | None = None
        self._served: TCPStore | None = None
        self._is_shut_down = False

    # -- interface of torchrun

    def get_backend(self) -> str:
        return self._params.backend

    @property
    def use_agent_store(self) -> bool:
        """True if the workers use the round's store. False if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, and wait for the next one that includes this node."""
        node, limit_s = self._live_node(), self.options.join_timeout
        while (joined := node.join(limit_s)) is not None:
            if (info := self._join_round(node, joined, time.monotonic() + limit_s)) is not None:
                log.info(
                    "round %d of %s: node %d of %d", joined.number, self.get_run_id(), joined.rank, joined.world_size
                )
                return info
            if not node.is_over:
                raise RendezvousTimeoutError(
                    f"round {joined.number} of {self.get_run_id()} has formed, but this node has not reached its store "
                    f"within {limit_s:g} s (join_timeout): check that it can connect to all ports of the other nodes"
                )
        raise self._no_round_error(node)

    def is_closed(self) -> bool:
        return self._node is not None and isinstance(self._node.outcome, RunCompleted | RunStopped)

    def set_closed(self) -> None:
        if not self._close(self._live_node()):
            limit_s = self.options.close_timeout
            raise RendezvousTimeoutError(
                f"could not report to the lighthouse within {limit_s:g} s (close_timeout) that {self.get_run_id()} is "
                "closed"
            )

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round has ended, or else 0.

        If it is 1, torchrun's agent restarts its workers. The next round forms once all nodes have stopped theirs.
        """
        node = self._node
        if node is None or isinstance(node.outcome, RunCompleted):
            return 0
        return int(node.is_over)

    def get_run_id(self) -> str:
        return self._params.run_id

    def shutdown(self) -> bool:
        """Leave the run. A node that was in a round ends the run for all nodes, as with torchrun's own backend.

        Returns:
            False if the lighthouse has not confirmed the end of the run within `close_timeout`, otherwise True.
        """
        node, self._is_shut_down = self._node, True
        if node is None:
            self._client.close()
            return True
        is_reported = not node.is_in_round or self._close(node)
        node.leave()
        self._client.close()
        self._served = None
        return is_reported

    # -- for elastic_agent.py

    def finished(self) -> None:
        """Report that this node's workers have succeeded. The round then continues even if this node is lost."""
        if self._node is not None:
            self._node.finish()

    def is_over_within(self, limit_s: float) -> bool:
        return self._node is not None and self._node.is_over_within(limit_s)

    def is_lost_elsewhere(self) -> bool:
        """Return whether the round has ended because another node was lost or wants to join.

        If so, this node's workers have failed only as a consequence. Wait up to `loss_timeout` for the lighthouse to
        report that the round has ended.
        """
        node = self._node
        if node is None or not node.is_over_within(self.options.loss_timeout):
            return False
        return not node.is_over_by_failure and not isinstance(node.outcome, RunCompleted)

    # -- a round

    def _join_round(self, node: Node, joined: Run, ends_at: float) -> RendezvousInfo | None:
        """Connect to the store of the round `joined`, and return the information that torchrun's agent needs.

        Return None if the round has ended or `ends_at` (a time.monotonic() value) has passed.
        """
        store = self._serve(node, joined, ends_at) if joined.rank == 0 else None
        while store is None and not node.is_over and time.monotonic() < ends_at:
            store = self._connect(node, joined, ends_at)
        if store is None or node.is_over:
            return None
        mine = RoundStore(f"torchrun/{joined.number}", store, lambda: node.is_over)
        try:
            if self.use_agent_store:
                info = RendezvousStoreInfo(store.host, store.port)
            else:
                info = RendezvousStoreInfo.build(joined.rank, mine, local_addr=self._host)
        except DistError:
            if node.is_over_within(self.options.loss_timeout):
                return None
            raise
        return RendezvousInfo(mine, joined.rank, joined.world_size, info)

    def _serve(self, node: Node, joined: Run, ends_at: float) -> TCPStore | None:
        """Serve the store of the round `joined`, and publish its address. Return None if that round has ended.

        Raises:
            RendezvousConnectionError: The lighthouse has not stored the address before `ends_at`, a time.monotonic()
                value.
        """
        store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
        self._served = store  # drops the reference to the store of the previous round
        while not node.is_over:
            try:
                self._client.put_key(
                    joined.number,
                    KeyKind.ITERATION,
                    _STORE,
                    str(Address(self._host, store.port)).encode(),
                    slot=node.machine.slot,
                    secret=self._secret,
                    timeout_s=CALL_TIMEOUT_S,
                )
            except WrongState:
                return None  # another round has formed
            except LighthouseError as e:  # it is down or paused, or has just lost this node or all its state
                if time.monotonic() >= ends_at:
                    raise RendezvousConnectionError(
                        f"{self._named_by}: the lighthouse has not stored where round {joined.number} of "
                        f"{self.get_run_id()} meets within {self.options.join_timeout:g} s (join_timeout): {e}"
                    ) from None
                node.is_over_within(RETRY_S)
            else:
                return store
        return None

    def _connect(self, node: Node, joined: Run, ends_at: float) -> TCPStore | None:
        """Try once to connect to the store of the round `joined`. If this fails, wait briefly and return None.

        Wait for the address of the store until `ends_at`, a time.monotonic() value.
        """

        def published() -> Address:
            _, keys = self._client.get_keys(joined.number, KeyKind.ITERATION, _STORE, timeout_s=CALL_TIMEOUT_S)
            if (KeyKind.ITERATION, _STORE) not in keys:
                raise UnknownName("key: the store of the round is not known yet")
            return parse_address(keys[KeyKind.ITERATION, _STORE].decode(), _STORE)

        try:
            where = until_set(published, ends_at - time.monotonic(), lambda: node.is_over)
            if where is None:
                return None
            store = TCPStore(where.host, where.port or 0, is_master=False, timeout=CONNECT_TIMEOUT)
        except (Unreachable, DistError, TimeoutError):  # the lighthouse or the node of rank 0 has just been lost
            node.is_over_within(RETRY_S)
            return None
        except WrongState:
            node.is_over_within(self.options.loss_timeout)
            return None
        store.set_timeout(STORE_TIMEOUT)
        return store

    # -- joining and leaving

    def _live_node(self) -> Node:
        """Return the node. If it has not joined the run, first connect it to the lighthouse."""
        if self._node is None and self._is_shut_down:
            raise self._left_error()
        if self._node is None:
            try:
                self._client.connect(self.options.connect_timeout)
            except Unreachable as e:
                raise RendezvousConnectionError(f"{self._named_by}: {e}") from None
            params = self._params
            terms = RunTerms(
                world_size=min(MAX_GROUP_WORLD_SIZE, params.max_nodes + MAX_SPARES),
                active=params.max_nodes,
                min_active=params.min_nodes,
                join_timeout_s=self.options.last_call_timeout,
                is_elastic=True,
            )
            entry = RankHello(
                RankId(0, uuid.uuid4().hex),
                terms,
                host=params.local_addr or socket.gethostname(),
                pid=os.getpid(),
                secret=self._secret,
            )
            self._node = Node(entry, self.options.join_timeout, self._client.rank)
            self._node.start()
        return self._node

    def _close(self, node: Node) -> bool:
        is_reported = node.outcome is not None or node.close(self.options.close_timeout)
        if not is_reported:
            log.warning("cannot report the end of %s to the lighthouse", self.get_run_id())
        return is_reported

    def _left_error(self) -> RendezvousClosedError:
        return RendezvousClosedError(f"this node has left {self.get_run_id()}: it was shut down")

    def _no_round_error(self, node: Node) -> RendezvousError:
        run_id, outcome = self.get_run_id(), node.outcome
        match outcome:
            case RunCompleted() if node.is_spare:
                return RendezvousGracefulExitError(f"{run_id} ended, and this spare node was not needed")
            case RunCompleted():
                return RendezvousClosedError(f"{run_id} ended: one of its nodes ended, or all have finished")
            case RunStopped():
                return RendezvousClosedError(f"{run_id} is stopped: {outcome.text}; `lighthouse resume` lifts that")
            case Unreachable() | NotPermitted():
                return RendezvousConnectionError(f"{self._named_by}: {outcome}")
            case LighthouseError():
                return RendezvousStateError(str(outcome))
            case None if self._is_shut_down:
                return self._left_error()
            case None:
                has_lighthouse = node.machine.has_lighthouse
                node.leave()
                self._node = None
                least, limit_s = self._params.min_nodes, self.options.join_timeout
                if not has_lighthouse:
                    return RendezvousConnectionError(
                        f"{self._named_by}: the lighthouse does not answer, and no round of {run_id} has formed within "
                        f"{limit_s:g} s (join_timeout); is it running?"
                    )
                return RendezvousTimeoutError(
                    f"no round of {run_id} has formed with this node within {limit_s:g} s (join_timeout); "
                    f"are {least} nodes running? `lighthouse runs` shows them"
                )


def create(params: RendezvousParameters) -> LighthouseRendezvous:
    named_by, variables = "--rdzv-endpoint" if params.endpoint else _VARIABLE, Variables(os.environ)
    text, job = params.endpoint or variables.text(_VARIABLE), variables.text("LIGHTHOUSE_JOB")
    name = params.run_id if params.run_id != NO_NAME else variables.text("LIGHTHOUSE_RUN_ID")
    if not name and not job:
        raise ValueError(
            f"--rdzv-id is missing, and all jobs with torchrun's default, {NO_NAME!r}, would form one job; pass "
            "--rdzv-id, or set LIGHTHOUSE_RUN_ID or LIGHTHOUSE_JOB, the same on all nodes of this job"
        )
    if not text:
        raise ValueError(f"--rdzv-endpoint is empty, and {_VARIABLE} is not set: set one to the lighthouse's address")
    try:
        coordinator = parse_coordinator(text, named_by).with_files(files_from())
        # The run of the nodes must not have the name that the run of the workers has by default.
        run = group_run(check_name(name or NO_NAME, "--rdzv-id"), "nodes")
        host = advertised_host(str(coordinator.addresses[0]), params.local_addr)
    except LighthouseError as e:
        raise ValueError(str(e)) from None
    client = LighthouseClient(coordinator, job=job or DEFAULT_JOB, run=run)
    return LighthouseRendezvous(params, client, named_by, host, Options.read(params.config))
