"""What a benchmark checks: a miss is seen, shown, and ends the program with status 1."""

import math

import pytest

from benchmarks import abuse, cli_start, faults, outage, recovery
from benchmarks.support.bars import Bar, conclude
from benchmarks.support.daemons import OURS, TORCHFT
from benchmarks.support.figures import Spread

FAST = recovery.Run(noticed_s=0.005, quorum_s=0.01, committed_s=0.03)
SLOW = recovery.Run(noticed_s=0.005, quorum_s=0.07, committed_s=0.101)
NEVER = recovery.Run(noticed_s=math.inf, quorum_s=math.inf, committed_s=math.inf)


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


def kills(*runs: recovery.Run, product: str = OURS) -> dict[str, object]:
    return {"fault": "kill-group", "product": product, "heartbeat_timeout_s": 5.0, "runs": list(runs)}


def commits(fault: str, *committed_s: float) -> dict[str, object]:
    runs = [recovery.Run(noticed_s=0.1, quorum_s=math.inf, committed_s=value) for value in committed_s]
    return {"fault": fault, "product": OURS, "runs": runs}


def outages(*runs: outage.Run) -> dict[str, object]:
    return {"name": "SIGKILL", "is_hidden": True, "runs": list(runs)}


def away(*, longest_step_s: float = 0.03, quorums: int = 1, revokes: int | None = None) -> outage.Run:
    crowd = None if revokes is None else {"revokes": revokes, "changes": 0}
    return outage.Run(1.0, 1.5, 0.021, 0.03, longest_step_s, 0, quorums, crowd)


def attacked(*, during_s: float = 0.1, memory_mib: float = 100.0, join_s: float = 1.0) -> abuse.Result:
    told = {"done": 1, "refused": {}, "last_refusal": ""}
    return abuse.Result("x", 0.05, during_s, 0.01, 0, memory_mib, join_s, 1.0, 0.1, 0.1, 0.5, told)


@pytest.mark.parametrize(
    ("bars", "met"),
    [
        # of a recovery the median and the largest
        (recovery.bars([kills(FAST, FAST, FAST)]), [True, True]),
        (recovery.bars([kills(FAST, FAST, SLOW)]), [True, False]),
        (recovery.bars([kills(FAST, SLOW, SLOW)]), [False, False]),
        (recovery.bars([kills(FAST, FAST, NEVER)]), [True, False]),
        (recovery.bars([kills(NEVER, product=TORCHFT)]), []),
        # of other faults the largest
        *((faults.bars([commits(fault, 0.1, 0.5)]), [True]) for fault in ("kill", "kill-workers", "kill-rank")),
        *((faults.bars([commits(fault, 0.1, 0.51)]), [False]) for fault in ("kill", "kill-workers", "kill-rank")),
        (faults.bars([commits("stop", 0.1, 3.0)]), [True]),
        (faults.bars([commits("stop", 0.1, 0.1, 3.01)]), [False]),
        # of an outage another quorum, a long step, and one of the others lost
        (outage.bars([outages(away(), away())]), [True, True, True]),
        (outage.bars([outages(away(), away(longest_step_s=0.08))]), [True, True, False]),
        (outage.bars([outages(away(quorums=2), away())]), [False, True, True]),
        (outage.bars([outages(away(revokes=0))]), [True, True, True, True]),
        (outage.bars([outages(away(revokes=1))]), [True, True, True, False]),
        # of a start the median
        (cli_start.bars([cli_start.Start("x", Spread(0.25, 0.2, 0.4))]), [True]),
        (cli_start.bars([cli_start.Start("x", Spread(0.251, 0.2, 0.3))]), [False]),
        # of an attack the others' steps, the memory, and both joins
        (abuse.bars([attacked()]), [True, True, True, True]),
        (abuse.bars([attacked(during_s=0.101)]), [False, True, True, True]),
        (abuse.bars([attacked(memory_mib=513)]), [True, False, True, True]),
        (abuse.bars([attacked(join_s=math.inf)]), [True, True, False, True]),
    ],
)
def test_what_is_checked(bars: list[Bar], met: list[bool]) -> None:
    assert [bar.is_met for bar in bars] == met


def test_survivors_that_never_go_on_are_shown() -> None:
    assert "> 8000" in recovery.render([kills(FAST, FAST, NEVER)])
