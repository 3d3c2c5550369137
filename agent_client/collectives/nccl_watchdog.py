"""What torch's watchdog of NCCL does when it is the first to see that a peer is lost, and how it is kept from that.

The watchdog of a group looks at its collectives ten times a second. When one has failed, it sleeps for a minute, so
that all ranks of the job can dump what they did, and tells the monitor of the process's first NCCL group. That one
dumps, sleeps for eight minutes, and ends the process unless its group is over; who gives a group up waits for both
sleeps. It is meant for jobs that end with their first failure. The first sleep was seen with torch 2.11; the rest is
what ProcessGroupNCCL.cpp says.
"""

import os

DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # it ends the process; where groups are aborted, torch asks for 0
    DUMP: "0",  # the monitor does not listen
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # a quarter of the watchdog's sleep
}
"""torch reads these when a group is made."""

WARNING = (
    f"the default process group has NCCL and was made with {DUMP} on, torch's default: torch may end this process "
    f"eight minutes after a peer was lost. Set {DUMP}=0 where this process is started, make the Agent before "
    "init_process_group, or take process_group: isolated:nccl"
)


def may_end_the_process(default_backends: str) -> bool:
    """`default_backends`: of the default group, which was made in this environment."""
    return "nccl" in default_backends and os.environ.get(DUMP, "1").lower() not in ("0", "n", "no", "f", "false")
