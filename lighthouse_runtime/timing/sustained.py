"""What is worth a line in the log only if it lasts."""

from collections.abc import Callable

from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer


class Sustained:
    """`say` hears a text that has been the same for `after_s`, once; `over`: it was said, and is true no more."""

    def __init__(self, timers: Timers, say: Callable[[str], None], over: Callable[[], None], after_s: float) -> None:
        self._say = say
        self._over = over
        self._after_s = after_s
        self._text = ""
        self._has_said = False
        self._timer = DeadlineTimer(self._lasts, timers)

    def set(self, text: str) -> None:
        """As it is now; empty: there is nothing to say."""
        if text == self._text:
            return
        self.close()
        self._text = text
        if text:
            self._timer.set_after(self._after_s)
        elif self._has_said:
            self._has_said = False
            self._over()

    def close(self) -> None:
        self._timer.cancel()

    def _lasts(self) -> None:
        self._has_said = True
        self._say(self._text)
