"""In-process restart: runs a function again in the same process after a failure of any rank of its run."""

from agent_client.restart.call import CallWrapper
from agent_client.restart.rank_thread import fork_and_monitor
from agent_client.restart.store import RestartAbort, State, StoreMixin
from agent_client.restart.wrapper import Wrapper

__all__ = ["CallWrapper", "RestartAbort", "State", "StoreMixin", "Wrapper", "fork_and_monitor"]
