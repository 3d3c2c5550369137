"""Several ranks of NCCL on one GPU."""

import os

import torch


def share_gpu(number: int = 0) -> torch.device:
    """The GPU of that number, or where there are fewer one that other ranks of this host have, too. NCCL refuses that
    to ranks of one host, so each says that it is a host of its own. To be called before the first group is made."""
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo")
    return device
