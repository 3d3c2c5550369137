"""Replaces torchft's native module with one that uses our daemons. Requires neither torch nor torchft.

    from agent_client.torchft import install
    install()

After that, torchft's Manager, Optimizer, DistributedDataParallel, LocalSGD and DiLoCo use our lighthouse and managers.
So does every script that uses these classes.
"""

from agent_client.torchft.clients import LighthouseClient, ManagerClient, Quorum, QuorumMember, QuorumResult, Timestamp
from agent_client.torchft.installation import install
from agent_client.torchft.servers import LighthouseServer, ManagerServer

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "Timestamp",
    "install",
]
