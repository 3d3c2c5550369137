"""A heal in the log of the rank that heals: its beginning, how far it is while it lasts, and what it has cost."""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from agent_client.progress.heal_mark import HealMark
from lighthouse_protocol.rules.heal import GroupHeal

log = logging.getLogger(__name__)

LOOKED_EVERY_S = 1.0
_RANK, _PROCESS = 0, ""


@contextmanager
def logged(mark: HealMark, *, is_beside: bool = False) -> Generator[None]:
    """For as long as the transfer runs. An exception that leaves the block: it has failed."""
    heal, is_over = GroupHeal(settled_s=0.0, is_beside=is_beside), threading.Event()
    _look(heal, mark)

    def follow() -> None:
        while not is_over.wait(LOOKED_EVERY_S):
            _look(heal, mark)

    thread = threading.Thread(target=follow, name="lighthouse heal", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        mark.failed()
        raise
    else:
        mark.over()
    finally:
        is_over.set()
        thread.join(LOOKED_EVERY_S)
        _look(heal, mark)


def _look(heal: GroupHeal, mark: HealMark) -> None:
    now = time.monotonic()
    heal.take(_RANK, _PROCESS, mark.read(), now)
    while line := heal.news(now):
        log.info("%s", line)
