"""How far a group has healed, at what rate, what is left, and which lines a log has; on a virtual clock."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.messages.progress import HealProgress
from lighthouse_protocol.messages.status import HealStatus
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.rules.heal import LOGGED_EVERY_S, RATE_OVER_S, STILL_SHOWN_S, GroupHeal
from lighthouse_protocol.wire.codec import compiled
from tests.lighthouse_protocol.drawn import messages

MIB, GIB = 2**20, 2**30
FROM_A = HealProgress(number=1, source="a", step=17)


class Heal:
    """A group whose ranks report at the moments that a test says."""

    def __init__(self, *, is_catching_up: bool = False) -> None:
        self.group = GroupHeal(is_catching_up=is_catching_up)
        self.lines: list[str] = []

    def report(
        self,
        at: float,
        received: float,
        *,
        rank: int = 0,
        process: str = "p",
        total: float | None = 1000.0,
        began_at: float = 0.0,
        number: int = 1,
        source: str = "a",
        step: int = 17,
        is_over: bool = False,
    ) -> None:
        """`received` of `total` MiB."""
        heal = HealProgress(
            number,
            source,
            step,
            int(received * MIB),
            None if total is None else int(total * MIB),
            at - began_at,
            is_over,
        )
        self.group.add_report(rank, process, heal, at)
        self.say(at)

    def say(self, now: float) -> None:
        while line := self.group.next_line(now):
            self.lines.append(f"{now:g} {line}")

    def flows(self, until: int, mib_per_s: float, since: int = 0, before: float = 0.0, **fields: object) -> None:
        for at in range(since, until + 1):
            self.report(at, before + mib_per_s * (at - since), **fields)  # type: ignore[arg-type]

    def at(self, now: float) -> HealStatus:
        status = self.group.status(now)
        assert status is not None
        return status


@pytest.fixture
def heal() -> Heal:
    return Heal()


class TestRate:
    def test_of_a_steady_heal_and_what_is_left(self, heal: Heal):
        heal.flows(20, 20)
        status = heal.at(20)
        assert (status.source, status.step, status.received, status.total) == ("a", 17, 400 * MIB, 1000 * MIB)
        assert status.bytes_per_s == 20 * MIB
        assert status.left_s == pytest.approx(30)
        assert status.text == "healing from a: 400 of 1000 MiB, 20 MiB/s, 30 s left"

    def test_between_two_reports_stays_and_what_is_left_runs_down(self, heal: Heal):
        heal.flows(20, 20)
        assert heal.at(21.5).bytes_per_s == 20 * MIB
        assert heal.at(21.5).left_s == pytest.approx(28.5)

    def test_is_that_of_the_last_seconds(self, heal: Heal):
        """It waited 30 s for its source, and a link that has become slow is not shown as fast."""
        heal.flows(30, 0)
        heal.flows(60, 30, since=30)
        assert heal.at(60).bytes_per_s == 30 * MIB
        heal.flows(80, 1, since=60, before=900)
        assert heal.at(80).bytes_per_s == MIB

    def test_of_the_first_moment_is_not_known(self, heal: Heal):
        heal.report(0.1, 1)
        assert (heal.at(0.1).bytes_per_s, heal.at(0.1).left_s) == (None, None)
        assert heal.at(0.1).text == "healing from a: 1.0 of 1000 MiB"

    def test_of_a_slow_heal_is_not_zero(self, heal: Heal):
        for at in range(0, 100, 4):  # a manager repeats what stands still every 4 s
            heal.report(at, at / 1024, total=10)
        assert heal.at(96).bytes_per_s == pytest.approx(1024, rel=0.01)
        assert heal.at(96).left_s == pytest.approx(10 * 1024, rel=0.02)

    def test_what_is_left_for_ages_is_not_told(self, heal: Heal):
        heal.flows(20, 0.0001)
        assert heal.at(20).left_s is None


class TestStalled:
    def test_falls_to_zero_and_no_end_is_foretold(self, heal: Heal):
        heal.flows(20, 20)
        heal.flows(40, 0, since=21, before=400)
        assert heal.at(40).bytes_per_s == 0
        assert heal.at(40).left_s is None
        assert heal.at(40).still_s == 20
        assert heal.at(40).text == "healing from a: 400 of 1000 MiB, nothing for 20 s"

    def test_so_does_that_of_a_manager_that_says_nothing(self, heal: Heal):
        heal.flows(20, 20)
        rates = [heal.at(20 + silent_s).bytes_per_s for silent_s in range(3, 20)]
        assert rates == sorted(rates, key=lambda rate: -(rate or 0))
        assert rates[-1] == 0

    def test_before_the_first_byte(self, heal: Heal):
        heal.report(5, 0, total=None)
        assert heal.at(5).text == "healing from a: 0 B, nothing for 5.0 s"

    def test_goes_on(self, heal: Heal):
        heal.flows(20, 20)
        heal.report(20 + STILL_SHOWN_S, 400)
        assert heal.at(20 + STILL_SHOWN_S).left_s is None
        heal.report(21 + STILL_SHOWN_S, 420)
        assert heal.at(21 + STILL_SHOWN_S).left_s is not None


def test_a_total_that_is_not_known_leaves_the_rate(heal: Heal):
    heal.flows(12, 20, total=None)
    assert (heal.at(12).total, heal.at(12).left_s) == (None, None)
    assert heal.at(12).text == "healing from a: 240 MiB, 20 MiB/s"


class TestRestarted:
    def test_another_source_begins_anew(self, heal: Heal):
        heal.flows(20, 40)
        heal.flows(25, 2, since=21, source="c")
        assert heal.at(25).bytes_per_s is not None
        assert heal.at(25).received == 8 * MIB
        assert heal.at(25).bytes_per_s == pytest.approx(8 * MIB / 25, rel=0.01)
        assert heal.lines[-2:] == [
            "20 healing from a: 800 of 1000 MiB, 40 MiB/s, 5.0 s left",
            "21 healing from c at step 17",
        ]

    @pytest.mark.parametrize("changed", [{"number": 2}, {"process": "q"}])
    def test_another_heal_has_a_rate_of_its_own(self, heal: Heal, changed: dict[str, object]):
        heal.flows(20, 40)
        heal.report(21, 850, began_at=20, **changed)  # type: ignore[arg-type]
        assert heal.at(21).bytes_per_s == 850 * MIB

    def test_one_that_has_failed_is_none(self, heal: Heal):
        heal.flows(20, 40)
        heal.group.add_report(0, "p", None, 21)
        heal.say(21)
        assert heal.group.status(21) is None
        assert heal.lines[-1] == "21 the heal from a at step 17 broke off after 800 of 1000 MiB"
        assert heal.group.next_at(21) is None


class TestSeveralRanks:
    def test_bytes_and_rates_are_added_up_and_the_slowest_counts(self, heal: Heal):
        for at in range(21):
            heal.report(at, 20 * at, rank=0)
            heal.report(at, 10 * at, rank=1)
        status = heal.at(20)
        assert (status.received, status.total, status.bytes_per_s) == (600 * MIB, 2000 * MIB, 30 * MIB)
        assert status.left_s == pytest.approx(80)

    def test_one_that_stands_still_holds_up_the_group(self, heal: Heal):
        for at in range(21):
            heal.report(at, 20 * at, rank=0)
            heal.report(at, 10 * min(at, 5), rank=1)
        assert heal.at(20).bytes_per_s == 20 * MIB
        assert (heal.at(20).left_s, heal.at(20).still_s) == (None, 15)

    def test_one_that_is_done_counts_until_all_are(self, heal: Heal):
        heal.flows(20, 50, rank=1)
        heal.report(20, 1000, rank=1, is_over=True)
        heal.report(20, 400, rank=0)
        assert (heal.at(20).received, heal.at(20).total) == (1400 * MIB, 2000 * MIB)
        heal.group.add_report(1, "p", None, 40)  # it is not reported any more
        heal.report(40, 800, rank=0)
        assert heal.at(40).received == 1800 * MIB
        heal.report(50, 1000, rank=0, is_over=True)
        assert heal.group.status(50) is None
        heal.say(51)
        assert heal.lines[-1] == "51 healed from a at step 17: 2.0 GiB in 50 s (40 MiB/s)"

    def test_one_total_that_is_not_known_leaves_the_group_without(self, heal: Heal):
        heal.report(1, 5, rank=0)
        heal.report(1, 5, rank=1, total=None)
        assert (heal.at(1).total, heal.at(1).left_s) == (None, None)

    def test_from_several_groups(self, heal: Heal):
        for rank, source in enumerate("dbace"):
            heal.report(1, 5, rank=rank, source=source)
        assert heal.at(1).source == "a, b, c and 2 more"

    def test_a_rank_whose_process_ends_breaks_it_off(self, heal: Heal):
        heal.flows(9, 10, rank=0)
        heal.report(9, 1000, rank=1, is_over=True)
        heal.group.retain_ranks({1}, 10)
        heal.say(12)
        assert heal.lines[-1] == "12 the heal from a at step 17 broke off after 1.1 of 2.0 GiB"

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.booleans()), max_size=60))
    def test_never_goes_back_within_a_heal(self, reports: list[tuple[int, int, bool]]):
        """Whatever the order in which ranks report and end."""
        heal, received, over = Heal(), dict.fromkeys(range(4), 0), set[int]()
        seen = 0
        for at, (rank, more, ends) in enumerate(reports):
            if rank not in over:
                received[rank] += more
                over |= {rank} if ends else set()
            heal.group.add_report(rank, "p", replace(FROM_A, received=received[rank], total=10_000, seconds=float(at),
                                               is_over=rank in over), float(at))  # fmt: skip
            status = heal.group.status(at)
            if status is not None:
                assert status.received >= seen
                seen = status.received
                assert status.left_s is None or status.left_s >= 0
            if len(over) == 4:
                break


class TestLines:
    def test_of_a_heal_that_lasts(self, heal: Heal):
        heal.flows(41, 100, total=4100)
        heal.report(41, 4100, total=4100, is_over=True)
        heal.say(42)
        assert heal.lines == [
            "0 healing from a at step 17",
            "10 healing from a: 1.0 of 4.0 GiB, 100 MiB/s, 31 s left",
            "20 healing from a: 2.0 of 4.0 GiB, 100 MiB/s, 21 s left",
            "30 healing from a: 2.9 of 4.0 GiB, 100 MiB/s, 11 s left",
            "40 healing from a: 3.9 of 4.0 GiB, 100 MiB/s, 1.0 s left",
            "42 healed from a at step 17: 4.0 GiB in 41 s (100 MiB/s)",
        ]

    def test_of_a_short_one_is_its_end(self, heal: Heal):
        heal.report(5, 10, total=10, began_at=4.8, is_over=True)
        assert heal.lines == []
        assert heal.group.next_at(5) == 6
        heal.say(6)
        assert heal.lines == ["6 healed from a at step 17: 10 MiB in 200 ms (50 MiB/s)"]

    def test_what_is_over_and_still_reported_is_said_once(self, heal: Heal):
        for at in range(15):
            heal.report(at, 10, total=10, began_at=at, is_over=True)
        assert len(heal.lines) == 1
        assert heal.group.next_at(15) is None

    def test_beside_the_steps(self):
        heal = Heal(is_catching_up=True)
        heal.flows(10, 20)
        heal.report(12, 1000, is_over=True)
        heal.say(13)
        assert [line.split(":")[0] for line in heal.lines] == [
            "0 catching up from a at step 17",
            "10 catching up from a",
            "13 received from a at step 17",
        ]

    @given(st.floats(0, 1e6), st.integers(0, 10**15), st.integers(0, 10**15), st.floats(0, 1e5))
    def test_next_lies_ahead_once_all_is_said(self, at: float, received: int, more: int, seconds: float):
        """A timer that is set by it never spins."""
        group = GroupHeal()
        group.add_report(0, "p", replace(FROM_A, received=received, total=received + more, seconds=seconds), at)
        while group.next_line(at):
            pass
        next_at = group.next_at(at)
        assert next_at is not None
        assert next_at > at
        assert next_at <= at + LOGGED_EVERY_S


@given(st.lists(st.tuples(st.floats(0, 1e9), messages(HealProgress)), min_size=1, max_size=5))
def test_whatever_a_manager_reports_the_status_can_be_read(reports: list[tuple[float, HealProgress]]):
    """One that is mad must not hide the others' status."""
    group, codec = GroupHeal(), compiled(HealStatus, lighthouse_pb2.HealStatus)
    now = 0.0
    for rank, (after_s, heal) in enumerate(reports):
        now += after_s
        group.add_report(rank, "p", heal, now)
        status = group.status(now + after_s)
        if status is not None:
            assert codec.read(codec.write(status)) == status


def test_reports_that_come_all_the_time_are_not_all_kept():
    group = GroupHeal()
    for n in range(100_000):
        group.add_report(0, "p", replace(FROM_A, received=n, total=10**6, seconds=n / 1000), n / 1000)
    assert len(group._ranks[0]._moments) < 50
    status = group.status(100.0)
    assert status is not None
    assert status.bytes_per_s == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(
    ("received", "total", "text"),
    [
        (0, 900, "0 of 900 B"),
        (1536, 20 * 1024, "1.5 of 20 KiB"),
        (5 * MIB, 9 * MIB, "5.0 of 9.0 MiB"),
        (int(1.2 * GIB), 4 * GIB, "1.2 of 4.0 GiB"),
        (40 * GIB, 130 * GIB, "40.0 of 130.0 GiB"),
    ],
)
def test_sizes(received: int, total: int, text: str):
    group = GroupHeal()
    group.add_report(0, "p", replace(FROM_A, received=received, total=total, seconds=0.1), RATE_OVER_S)
    status = group.status(RATE_OVER_S)
    assert status is not None
    assert status.text == f"healing from a: {text}"
