"""A manager for a group that was given only a lighthouse: a child process of rank 0, ending with it."""

import os
import select
import subprocess
import sys

from agent_client.errors import AgentError

START_TIMEOUT_S = 120.0


class ManagerProcess:
    def __init__(self, process: "subprocess.Popen[bytes]", address: str) -> None:
        self._process = process
        self.address = address

    @classmethod
    def start(cls, lighthouse: str, replica_id: str, group_world_size: int) -> "ManagerProcess":
        """Raises AgentError if it does not come up; its own output has said why."""
        receiving, sending = os.pipe()
        arguments = {
            "--lighthouse": lighthouse,
            "--replica-id": replica_id,
            "--group-world-size": str(group_world_size),
            "--bind": "[::]:0",
            "--announce-fd": str(sending),
            "--parent-pid": str(os.getpid()),
        }
        # -P: the training repository may have a `manager` of its own in its working directory.
        command = [sys.executable, "-P", "-c", "from manager.cli import main; main()", "serve"]
        try:
            process = subprocess.Popen(
                command + [text for pair in arguments.items() for text in pair],
                pass_fds=(sending,),
                stdin=subprocess.DEVNULL,
            )
        finally:
            os.close(sending)
        return cls(process, _announced(process, receiving))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _announced(process: "subprocess.Popen[bytes]", receiving: int) -> str:
    with open(receiving, closefd=True) as pipe:
        ready, _, _ = select.select([pipe], [], [], START_TIMEOUT_S)
        address = pipe.readline().strip() if ready else ""
    if address:
        return address
    process.kill()
    status = process.wait()
    raise AgentError(f"the group's manager did not start (status {status}); its messages stand above")
