"""Patches for torchrun's agent that our rendezvous handler needs. Each patch wraps a method of torch's agent.

1. If the workers of this node fail because another node was lost, the failure does not count against --max-restarts.
   The default of this option is 0, so otherwise the whole job would fail.
2. If a node is lost while the others exchange their ranks, the others rendezvous again instead of failing.
3. A spare that is not needed exits successfully. torch's agent logs that it will do so, but then fails.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from agent_client.torchrun.handler import LighthouseRendezvous

log = logging.getLogger(__name__)

_MARK = "lighthouse_torchrun"


def extend() -> None:
    """Patch torch's elastic agent for LighthouseRendezvous. Further calls do nothing.

    Agents that use another rendezvous handler behave as before.
    """
    for wrapper in (_monitor_workers, _rendezvous, _invoke_run):
        name = wrapper.__name__
        original = getattr(LocalElasticAgent, name, None)
        if original is None:
            log.warning("this version of torch has no LocalElasticAgent.%s: see docs/how-to/torchrun.md", name)
        elif not hasattr(original, _MARK):
            setattr(LocalElasticAgent, name, _wrap(original, wrapper))


def _wrap(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(agent: LocalElasticAgent, *arguments: Any) -> Any:
        return wrapper(agent, original, *arguments)

    setattr(wrapped, _MARK, True)
    return wrapped


def _monitor_workers(agent: LocalElasticAgent, original: Callable[..., Any], worker_group: Any) -> Any:
    result, handler = original(agent, worker_group), worker_group.spec.rdzv_handler
    if not isinstance(handler, LighthouseRendezvous):
        return result
    if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) and handler.is_lost_elsewhere():
        return RunResult(state=WorkerState.HEALTHY)  # the agent then reads num_nodes_waiting and restarts its workers
    if result.state is WorkerState.SUCCEEDED:
        handler.finished()
    return result


def _rendezvous(agent: LocalElasticAgent, original: Callable[..., Any], worker_group: Any) -> None:
    handler = worker_group.spec.rdzv_handler
    while True:
        try:
            return original(agent, worker_group)
        except DistError as e:
            is_ours = isinstance(handler, LighthouseRendezvous)
            if not (is_ours and handler.is_over_within(handler.options.loss_timeout)):
                raise
            log.info("the nodes rendezvous again: %s", e)


def _invoke_run(agent: LocalElasticAgent, original: Callable[..., Any], *arguments: Any) -> Any:
    group = agent.get_worker_group()
    try:
        return original(agent, *arguments)
    except RendezvousGracefulExitError as e:
        if not isinstance(group.spec.rdzv_handler, LighthouseRendezvous):
            raise
        log.info("%s", e)
        return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in group.workers})
