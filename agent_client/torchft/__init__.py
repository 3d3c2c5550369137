"""Names of torchft's native module, implemented over our daemons. Needs neither torch nor torchft.

    from agent_client.torchft import install
    install()

After that a torchft script runs on our lighthouse and managers. So do torchft's own Manager, Optimizer,
DistributedDataParallel, LocalSGD and DiLoCo.
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
