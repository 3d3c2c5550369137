"""The open watches of the ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import ToRank, WatchHello
from lighthouse_runtime.ports import Peer


@dataclass(eq=False, slots=True)
class Watch:
    """A rank's stream, and the process that it is of. `is_local`: that process is on this host, in this pid namespace.
    `heard_at`: when the rank last sent something, whatever that was. `healed`: its heals, as it has told them last."""

    hello: WatchHello
    peer: Peer[ToRank]
    is_local: bool
    heard_at: float
    is_open: bool = True
    healed: HealTotals | None = None


class WatchTable:
    """By number. Iterates over the open watches."""

    def __init__(self) -> None:
        self._watches: dict[int, Watch] = {}

    def __iter__(self) -> Iterator[Watch]:
        return iter(self._watches.values())

    def get(self, number: int) -> Watch | None:
        """None: it has ended."""
        return self._watches.get(number)

    def add(self, number: int, watch: Watch) -> None:
        self._watches[number] = watch

    def remove(self, number: int) -> Watch | None:
        """None: it had ended before."""
        watch = self._watches.pop(number, None)
        if watch is not None:
            watch.is_open = False
            watch.peer.end()
        return watch

    def send(self, message: ToRank, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (watch := self._watches.get(number)) is not None:
                watch.peer.send(message)

    def send_all(self, message: ToRank) -> None:
        self.send(message, self._watches)
