"""A manager for a group that was given only a lighthouse: a child process of rank 0, ending with it."""

from agent_client.errors import AgentError
from lighthouse_runtime.process.commands import START_MANAGER
from lighthouse_runtime.process.daemon_child import ServerProcess


class ManagerProcess:
    def __init__(self, lighthouse: str, replica_id: str, group_world_size: int) -> None:
        """Raises AgentError if it does not come up; its own output has said why."""
        options = {
            "--lighthouse": lighthouse,
            "--replica-id": replica_id,
            "--group-world-size": str(group_world_size),
            "--bind": "[::]:0",
        }
        try:
            self._server = ServerProcess(START_MANAGER, options, name="the group's manager")
        except RuntimeError as e:
            raise AgentError(str(e)) from None
        self.address = self._server.announced

    @property
    def is_alive(self) -> bool:
        return self._server.is_alive

    def stop(self) -> None:
        self._server.stop()
