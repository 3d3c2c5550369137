"""One rank of a group that lives in a child process."""

import os
import time

import torch

from agent_client.collectives import isolated
from tests.agent_client.actors import GlooActor, digest


class IsolatedActor(GlooActor):
    connected_by = "isolated"

    def all_reduce_odd_tensors(self, rank: int) -> list[str]:
        """Digests of the sums of what is not a plain vector of floats."""
        assert self.group is not None
        generator = torch.Generator().manual_seed(rank)
        square = torch.randn(40, 40, generator=generator)
        tensors = [
            square.t()[::2],
            square.double(),
            square.to(torch.bfloat16),
            (1000 * square).long(),
            torch.tensor(float(rank)),
        ]
        for tensor in tensors:
            self.group.all_reduce(tensor)
        return [digest(tensor.double()) for tensor in tensors]

    def drop(self) -> None:
        """Its child, too."""
        if self.group is not None:
            self.group.abort()
        super().drop()

    def allow_slack(self, slack_s: float) -> None:
        isolated.SLACK_S = slack_s

    def fork(self) -> int:
        """The pid of a process that holds all of this one's sockets and does nothing, as a loader's worker may."""
        pid = os.fork()
        if pid == 0:
            time.sleep(60.0)
            os._exit(0)
        return pid

    def close(self) -> None:
        self.connector.close()
