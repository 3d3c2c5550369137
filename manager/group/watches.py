"""The open watches of the ranks: whoever keeps something by them hears of each; what is for a rank is told by it."""

from collections.abc import Iterable

from lighthouse_protocol.messages.session import ToRank, WatchOpened, WatchRequest
from lighthouse_protocol.wire.streams import WATCH_RESPONSES
from lighthouse_runtime.server.streams import Sender
from manager.group.ports import EvidenceSource
from manager.group.progress import GroupProgressDriver
from manager.group.waits import Waits
from manager.group.worlds import Worlds


class Watchers:
    def __init__(self, places: GroupProgressDriver, worlds: Worlds, waits: Waits, evidence: EvidenceSource) -> None:
        self._places = places
        self._worlds = worlds
        self._waits = waits
        self._evidence = evidence
        self._senders: dict[int, Sender] = {}

    def opened(self, watch: int, request: WatchRequest, sender: Sender, *, is_here: bool) -> None:
        self._senders[watch] = sender
        self._places.opened(watch, request)
        self._evidence.opened(watch, request, sender, is_here=is_here)
        self.push(WatchOpened(), (watch,))
        self._worlds.opened(watch, sender)
        self._waits.opened(watch, sender)

    def ended(self, watch: int) -> bool:
        """Whether it was open until now."""
        sender = self._senders.pop(watch, None)
        if sender is not None:
            sender.end()
            self._places.ended(watch)
            self._evidence.ended(watch)
            self._worlds.ended(watch)
            self._waits.ended(watch)
        return sender is not None

    def push(self, message: ToRank, watches: Iterable[int]) -> None:
        body = WATCH_RESPONSES.write(message).SerializeToString()
        for watch in watches:
            if (sender := self._senders.get(watch)) is not None:
                sender.send(body)

    def push_all(self, message: ToRank) -> None:
        self.push(message, self._senders)

    def close(self) -> None:
        self._places.close()
        self._evidence.close()
        self._worlds.close()
        self._waits.close()
