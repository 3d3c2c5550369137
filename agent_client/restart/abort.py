"""What a wrapped function may wait for in C code, ended from another thread. torch is looked at only if it is loaded.

Groups of agent_client and torch's NCCL groups end at once. Torch's own gloo groups cannot be aborted (wait() returns
only when the peer's socket closes): a function that hangs in one is ended by the hard timeout.
"""

import sys


def abort_groups() -> None:
    """Every process group that this process holds."""
    open_groups = sys.modules.get("agent_client.collectives.open_groups")
    if open_groups is not None:
        open_groups.abort_all()
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.distributed_c10d._abort_process_group()
