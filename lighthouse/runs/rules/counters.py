"""Which number the next generation gets, and the restart counters. One allocator, so numbers only rise.

- In-process restart, exclusion of a rank, promotion of a spare, rejoin: current + 1.
- A process that a supervisor restarted is active for the first time: the next multiple of the stride.
- `job_restarts` moves when an incident begins, whatever dies after that; `ranks_restarts` when it is recovered.
"""

from dataclasses import replace

from lighthouse_protocol.messages.run import RunCounters


def next_number(current: int, stride: int, *, is_process_restart: bool) -> int:
    return (current // stride + 1) * stride if is_process_restart else current + 1


def advance(counters: RunCounters, stride: int, *, is_process_restart: bool, after_incident: bool) -> RunCounters:
    """Those of the next generation."""
    number = next_number(counters.number, stride, is_process_restart=is_process_restart)
    begins = is_process_restart or stride == 1 or counters.number < 0
    return replace(
        counters,
        number=number,
        global_iteration=number if begins else counters.global_iteration,
        ranks_restarts=0 if is_process_restart else counters.ranks_restarts + after_incident,
    )


def count_incident(counters: RunCounters) -> RunCounters:
    return replace(counters, job_restarts=counters.job_restarts + 1)


def learn(counters: RunCounters, seen: int, stride: int) -> RunCounters:
    """A rank was told of `seen`, which is not known here any more: the next number is above it."""
    if seen <= counters.number:
        return counters
    return replace(counters, number=seen, global_iteration=max(counters.global_iteration, seen // stride * stride))
