"""One side of a healing, of benchmarks/heal.py, in a rank: what memory it takes."""

from typing import Any

import torch

from benchmarks.support.healing import TRANSPORTS, Side, make_model


class MemoryActor:
    def build(self, kind: str, size_bytes: int) -> None:
        torch.set_num_threads(1)
        model = make_model(size_bytes)
        self.side = Side(TRANSPORTS[kind](model), model)

    def do(self, order: str, **arguments: Any) -> Any:
        return self.side.handle(order, **arguments)
