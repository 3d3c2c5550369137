"""A child's side of Child.ask: one line of JSON in, one line of JSON out, until standard input closes."""

import json
import sys
from collections.abc import Callable
from typing import Any


def answer_orders(handle: Callable[..., Any]) -> None:
    for line in sys.stdin:
        print(json.dumps(handle(**json.loads(line))), flush=True)
