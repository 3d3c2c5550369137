"""What a benchmark checks: a miss is seen, shown, and ends the program with status 1."""

import math

import pytest

from benchmarks import faults, outage, recovery
from benchmarks.support.bars import Bar, conclude
from benchmarks.support.daemons import OURS, TORCHFT

FAST = recovery.Run(noticed_s=0.005, quorum_s=0.01, committed_s=0.03)
SLOW = recovery.Run(noticed_s=0.005, quorum_s=0.07, committed_s=0.101)
NEVER = recovery.Run(noticed_s=math.inf, quorum_s=math.inf, committed_s=math.inf)


def kills(runs: list[recovery.Run], product: str = OURS) -> dict[str, object]:
    return {"fault": "kill-group", "product": product, "heartbeat_timeout_s": 5.0, "runs": runs}


def met(bars: list[Bar]) -> list[bool]:
    return [bar.is_met for bar in bars]


def test_a_miss_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        conclude([Bar("wall", 1.0, 2.0, "s"), Bar("memory", 151, 150, "MB")], is_checked=True)
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert " yes |" in shown
    assert "151 MB |" in shown


def test_a_miss_that_is_not_checked_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    conclude([Bar("wall", 3.0, 2.0, "s")], is_checked=False)
    assert "**no** |" in capsys.readouterr().out


def test_what_is_met_ends_well() -> None:
    conclude([Bar("wall", 2.0, 2.0, "s")], is_checked=True)


class TestRecovery:
    def test_the_median_and_the_largest_are_checked(self) -> None:
        assert met(recovery.bars([kills([FAST, FAST, FAST])])) == [True, True]
        assert met(recovery.bars([kills([FAST, FAST, SLOW])])) == [True, False]
        assert met(recovery.bars([kills([FAST, SLOW, SLOW])])) == [False, False]

    def test_survivors_that_never_go_on_are_a_miss(self) -> None:
        results = [kills([FAST, FAST, NEVER])]
        assert met(recovery.bars(results)) == [True, False]
        assert "> 8000" in recovery.render(results)

    def test_torchft_has_no_bars(self) -> None:
        assert recovery.bars([kills([NEVER], TORCHFT)]) == []


class TestFaults:
    @pytest.mark.parametrize(
        ("fault", "limit_s"), [("kill", 0.5), ("kill-workers", 0.5), ("kill-rank", 0.5), ("stop", 3.0)]
    )
    def test_the_largest_is_checked(self, fault: str, limit_s: float) -> None:
        def bars(*committed_s: float) -> list[bool]:
            runs = [recovery.Run(noticed_s=0.1, quorum_s=math.inf, committed_s=value) for value in committed_s]
            return met(faults.bars([{"fault": fault, "product": OURS, "runs": runs}]))

        assert bars(0.1, limit_s) == [True]
        assert bars(0.1, 0.1, limit_s + 0.01) == [False]


class TestOutage:
    def run(self, *, longest_step_s: float = 0.03, quorums: int = 1, revokes: int | None = None) -> outage.Run:
        crowd = None if revokes is None else {"revokes": revokes, "changes": 0}
        return outage.Run(1.0, 1.5, 0.021, 0.03, longest_step_s, 0, quorums, crowd)

    def bars(self, runs: list[outage.Run]) -> list[bool]:
        return met(outage.bars([{"name": "SIGKILL", "is_hidden": True, "runs": runs}]))

    def test_a_long_step_is_a_miss(self) -> None:
        assert self.bars([self.run(), self.run()]) == [True, True, True]
        assert self.bars([self.run(), self.run(longest_step_s=0.08)]) == [True, True, False]

    def test_another_quorum_is_a_miss(self) -> None:
        assert self.bars([self.run(quorums=2), self.run()]) == [False, True, True]

    def test_one_of_the_others_lost_is_a_miss(self) -> None:
        assert self.bars([self.run(revokes=0)]) == [True, True, True, True]
        assert self.bars([self.run(revokes=1)]) == [True, True, True, False]
