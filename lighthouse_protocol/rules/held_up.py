"""When whoever judges others by time was held up itself. No I/O.

A process that was paused, swapped out or moved with its machine has read nothing meanwhile: those that it judges may
have moved, and where they share the machine they could not. So that time counts against nobody.
"""

from lighthouse_protocol.messages.progress import RankView

MAX_TIMES = 64


class HeldUp:
    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []  # when each ended, and how long it was; the newest last

    def was_late(self, by_s: float, now: float) -> None:
        """It was held up for `by_s` until now. Of more than MAX_TIMES times, the two oldest count as one."""
        self._times.append((now, by_s))
        if len(self._times) > MAX_TIMES:
            (_, first_s), (ended_at, second_s), *newer = self._times
            self._times = [(ended_at, first_s + second_s), *newer]

    def within(self, age_s: float, now: float) -> float:
        """For how long of the last `age_s` seconds it was held up."""
        since, total_s = now - age_s, 0.0
        for ended_at, length_s in reversed(self._times):
            if ended_at <= since:
                break
            total_s += min(length_s, ended_at - since)
        return min(total_s, age_s)

    def without(self, rank: RankView, now: float) -> RankView:
        """The rank, by that time younger."""
        if not self._times:
            return rank
        of_beat_s = self.within(rank.beat_age_s, now)
        of_sample_s = self.within(rank.progress_age_s, now) - of_beat_s
        return rank.aged(-of_beat_s, -of_sample_s) if of_beat_s or of_sample_s else rank
