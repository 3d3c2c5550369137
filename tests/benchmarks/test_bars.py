"""What a benchmark checks: a miss is seen, shown, and ends the program with status 1."""

import math
from typing import Any

import pytest

from benchmarks import outage, recovery
from benchmarks.support.daemons import OURS, TORCHFT
from benchmarks.support.figures import Bar, finish, table_of

FAST = recovery.Run(noticed_s=0.005, quorum_s=0.01, committed_s=0.03)
SLOW = recovery.Run(noticed_s=0.005, quorum_s=0.07, committed_s=0.101)
NEVER = recovery.Run(noticed_s=math.inf, quorum_s=math.inf, committed_s=math.inf)


def test_a_miss_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        finish("text", {}, [Bar("wall", 1.0, 2.0, "s"), Bar("memory", 151, 150, "MB")], is_checked=True, path=None)
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert " yes |" in shown
    assert "151 MB |" in shown


def test_a_miss_that_is_not_checked_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    finish("text", {}, [Bar("wall", 3.0, 2.0, "s")], is_checked=False, path=None)
    assert "**no** |" in capsys.readouterr().out


def test_what_is_met_ends_well() -> None:
    finish("text", {}, [Bar("wall", 2.0, 2.0, "s")], is_checked=True, path=None)


def kills(*runs: recovery.Run, product: str = OURS) -> dict[str, object]:
    return {"fault": "kill-group", "product": product, "heartbeat_timeout_s": 5.0, "runs": list(runs)}


def outages(*runs: outage.Run) -> dict[str, Any]:
    return {"name": "SIGKILL", "is_hidden": True, "runs": list(runs)}


def away(*, longest_step_s: float = 0.03, quorums: int = 1, revokes: int | None = None) -> outage.Run:
    return outage.Run(1.0, 1.5, 0.021, 0.03, longest_step_s, 0, quorums, revokes)


@pytest.mark.parametrize(
    ("bars", "met"),
    [
        # of a recovery the median and the largest
        (recovery.bars([kills(FAST, FAST, FAST)]), [True, True]),
        (recovery.bars([kills(FAST, FAST, SLOW)]), [True, False]),
        (recovery.bars([kills(FAST, SLOW, SLOW)]), [False, False]),
        (recovery.bars([kills(FAST, FAST, NEVER)]), [True, False]),
        (recovery.bars([kills(NEVER, product=TORCHFT)]), []),
        # of an outage another quorum, a long step, and one of the others lost
        (outage.bars(**outages(away(), away())), [True, True, True]),
        (outage.bars(**outages(away(), away(longest_step_s=0.08))), [True, True, False]),
        (outage.bars(**outages(away(quorums=2), away())), [False, True, True]),
        (outage.bars(**outages(away(revokes=0))), [True, True, True, True]),
        (outage.bars(**outages(away(revokes=1))), [True, True, True, False]),
    ],
)
def test_what_is_checked(bars: list[Bar], met: list[bool]) -> None:
    assert [bar.is_met for bar in bars] == met


def test_survivors_that_never_go_on_are_shown() -> None:
    assert "> 8000" in table_of(recovery.COLUMNS, [kills(FAST, FAST, NEVER)])
