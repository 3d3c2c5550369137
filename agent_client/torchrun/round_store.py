"""The store of one round, for torchrun's agents: what waits in it ends with the round, not by the store's timeout."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

SLICE_S = 0.1
LEAST_S = 0.001


class RoundOver(DistStoreError):
    """A node of the round was lost, has failed, or another wants to come in."""


class RoundStore(Store):
    """`inner`, until `is_over` says that the round is. Agents exchange their ranks here, and meet at the end."""

    def __init__(self, inner: Store, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._is_over = is_over

    @property
    def timeout(self) -> timedelta:
        return self._inner.timeout  # pyright: ignore[reportAttributeAccessIssue]

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._wait([key], self.timeout)
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._inner.compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._wait(keys, self.timeout)
        return self._inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._inner.multi_set(keys, values)  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self.timeout if timeout is None else timeout)

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        ends_at = time.monotonic() + timeout.total_seconds()
        while True:
            left_s = ends_at - time.monotonic()
            try:
                return self._inner.wait(list(keys), timedelta(seconds=min(SLICE_S, max(LEAST_S, left_s))))
            except DistStoreError:
                if self._is_over():
                    raise RoundOver(f"the round is over, and {', '.join(keys)} will not be set in its store") from None
                if left_s <= SLICE_S:
                    raise
