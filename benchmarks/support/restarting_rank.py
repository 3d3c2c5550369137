"""A rank without torch under a supervisor. It requests its first quorum, prints the age of its process, and waits.

The line is `quorum ATTEMPT RANK AGE`. AGE is in seconds since the start of the process, according to the kernel.
"""

import os
import time

from lighthouse_runtime.client.clients import ManagerClient
from lighthouse_runtime.process.children import started_at


def main() -> None:
    rank, attempt = int(os.environ["RANK"]), os.environ["LIGHTHOUSE_ATTEMPT"]
    address, secret = os.environ["LIGHTHOUSE_MANAGER_ADDRESS"], os.environ["LIGHTHOUSE_MANAGER_SECRET"]
    with ManagerClient(address, secret) as manager:
        manager.quorum(rank, 0, timeout_s=60.0, rank_incarnation=os.environ["LIGHTHOUSE_INCARNATION"])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_at(os.getpid()) / os.sysconf("SC_CLK_TCK")
        print("quorum", attempt, rank, f"{age_s:.3f}", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
