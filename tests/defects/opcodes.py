"""How much work a call is, the same on every machine: bytecode instructions, loops and comprehensions included."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count(work: Callable[[], object]) -> int:
    total = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal total
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        total += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return total
