"""For those who use torchft: the names of its native module, over our daemons. No torch, and no torchft.

    from agent_client.torchft import install
    install()

makes a torchft script, and torchft's own Manager, Optimizer, DistributedDataParallel, LocalSGD and DiLoCo, run on our
lighthouse and managers.
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
