"""The open watches of the ranks: one record each, and what is told to many."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lighthouse_protocol.messages.session import ToRank, WatchRequest
from lighthouse_runtime.ports import Peer


@dataclass(slots=True)
class Watch:
    """`is_here`: the rank is on this host, in this pid namespace. `votes`: calls whose decision it waits for."""

    peer: Peer[ToRank]
    request: WatchRequest
    is_here: bool
    votes: set[int] = field(default_factory=set[int])


class WatchTable:
    def __init__(self) -> None:
        self._watches: dict[int, Watch] = {}

    def __iter__(self) -> Iterator[Watch]:
        return iter(self._watches.values())

    def add(self, number: int, watch: Watch) -> None:
        self._watches[number] = watch

    def get(self, number: int) -> Watch | None:
        return self._watches.get(number)

    def remove(self, number: int) -> Watch | None:
        return self._watches.pop(number, None)

    def tell(self, numbers: Iterable[int], message: ToRank) -> None:
        for number in numbers:
            if (watch := self._watches.get(number)) is not None:
                watch.peer.send(message)

    def tell_all(self, message: ToRank) -> None:
        self.tell(self._watches, message)
