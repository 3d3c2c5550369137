import logging

import pytest

from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_protocol.rules.preemption import ANSWER_WITHIN_S, EXIT_MARGIN_S
from manager.preemption.watch import PreemptionWatch
from tests.virtual_loop import VirtualLoop


class Group:
    """A group's manager. It has left as soon as `has_left` is set."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.has_left = False
        self.has_ranks = True

    def report_preemption(self, notice: PreemptionNotice | None) -> None:
        self.done.append(f"report {notice and notice.reason}")

    def set_preemption(self, notice: PreemptionNotice | None, *, should_save: bool) -> None:
        self.done.append(f"ranks {notice and notice.reason}{' save' if should_save else ''}")

    def drain(self, reason: str, *, is_revocable: bool = False) -> None:
        self.done.append(f"drain {reason}{' revocable' if is_revocable else ''}")

    def cancel_drain(self) -> bool:
        self.done.append("cancel")
        return not self.has_left

    def taken(self) -> list[str]:
        done, self.done = self.done, []
        return done


class Stage:
    def __init__(self) -> None:
        self.loop, self.group = VirtualLoop(), Group()
        self.watch = PreemptionWatch(self.group, self.loop, self.loop.time)

    def notice(self, reason: str, left_s: float | None = 120, *, is_advice: bool = False) -> PreemptionNotice:
        return PreemptionNotice("aws", reason, "h", None if left_s is None else self.loop.now + left_s, is_advice)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_group_drains_when_the_lighthouse_has_answered_that_others_stay(stage: Stage):
    stage.watch.set_notice(0, "aws", stage.notice("x"))
    assert stage.group.taken() == ["report x", "ranks x"]
    stage.watch.record_answer(2)
    assert stage.group.taken() == ["ranks x", "drain preemption: x revocable"]
    stage.watch.record_answer(1)
    assert stage.group.taken() == ["ranks x"]
    stage.loop.go(200)
    assert stage.group.taken() == []
    assert stage.watch.save_left_s == 0


def test_the_last_group_saves_until_shortly_before_the_host_ends(stage: Stage):
    stage.watch.set_notice(0, "aws", stage.notice("x", 60))
    assert stage.watch.save_left_s == ANSWER_WITHIN_S
    stage.watch.record_answer(0)
    assert stage.group.taken()[-2:] == ["ranks x save", "drain preemption: x revocable"]
    stage.loop.go(10)
    assert stage.watch.save_left_s == 60 - EXIT_MARGIN_S - 10
    stage.loop.go(60)
    assert stage.watch.save_left_s == 0


def test_without_an_answer_it_counts_as_the_last(stage: Stage):
    stage.watch.set_notice(0, "aws", stage.notice("x"))
    stage.loop.go(ANSWER_WITHIN_S - 0.1)
    assert stage.group.taken() == ["report x", "ranks x"]
    stage.loop.go(0.2)
    assert stage.group.taken() == ["ranks x save", "drain preemption: x revocable"]


@pytest.mark.parametrize("back_s", [0.0005, 3600.0])
def test_it_waits_no_longer_where_the_clock_is_set_back_or_the_timer_is_early(stage: Stage, back_s: float):
    stage.watch = PreemptionWatch(stage.group, stage.loop, lambda: stage.loop.now - back_s * (stage.loop.now > 1000))
    stage.watch.set_notice(0, "aws", stage.notice("x"))
    stage.loop.go(ANSWER_WITHIN_S)
    assert stage.group.taken()[-2:] == ["ranks x save", "drain preemption: x revocable"]


def test_when_the_other_group_leaves_too_the_last_one_saves(stage: Stage):
    stage.watch.set_notice(0, "aws", stage.notice("x"))
    stage.watch.record_answer(1)
    stage.group.taken()
    stage.watch.record_answer(0)
    assert stage.group.taken() == ["ranks x save"]


def test_a_reason_cannot_forge_a_line_of_the_log(stage: Stage, caplog: pytest.LogCaptureFixture):
    stage.watch.set_notice(0, "file", stage.notice("x\nE lost all\x1b[2J"))
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().isprintable()


def test_advice_is_reported_and_changes_nothing_else(stage: Stage):
    stage.watch.set_notice(0, "aws", stage.notice("rebalance", None, is_advice=True))
    stage.watch.record_answer(3)
    stage.loop.go(100)
    assert stage.group.taken() == ["report rebalance", "ranks rebalance", "ranks rebalance"]
    stage.watch.set_notice(0, "aws", stage.notice("spot"))
    assert stage.group.taken() == ["report spot", "ranks spot"]


def test_the_notice_that_ends_first_counts_and_the_same_one_is_reported_once(stage: Stage):
    late, early = stage.notice("late", 100), stage.notice("early", 50)
    stage.watch.set_notice(0, "aws", late)
    stage.watch.set_notice(1, "", early)
    stage.watch.set_notice(1, "", early)
    stage.watch.set_notice(0, "file", stage.notice("later", 200))
    assert [line for line in stage.group.taken() if line.startswith("report")] == ["report late", "report early"]
    stage.watch.lose_host(1)
    assert stage.group.taken()[0] == "report late"


@pytest.mark.parametrize("has_left", [False, True])
def test_a_withdrawal_cancels_a_drain_that_is_not_carried_out(
    stage: Stage, has_left: bool, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    stage.watch.set_notice(0, "aws", stage.notice("x"))
    stage.watch.record_answer(1)
    stage.group.taken()
    stage.group.has_left = has_left
    stage.watch.set_notice(0, "aws", None)
    assert stage.group.taken() == ["report None", "ranks None", "cancel"]
    assert stage.watch.is_draining is has_left
    said = caplog.records[-1].getMessage()
    assert said == ("the notice was withdrawn too late: the group leaves" if has_left else "the group stays")
    if not has_left:
        stage.watch.set_notice(0, "aws", stage.notice("again"))
        stage.watch.record_answer(1)
        assert stage.group.taken()[-1] == "drain preemption: again revocable"


def test_ranks_without_an_agent_have_until_shortly_before_the_host_ends(stage: Stage, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    stage.group.has_ranks = False
    assert stage.watch.exit_left_s == 0
    stage.watch.set_notice(0, "aws", stage.notice("rebalance", None, is_advice=True))
    assert stage.watch.exit_left_s == 0
    stage.watch.set_notice(0, "aws", stage.notice("x", 60))
    stage.loop.go(1)
    stage.watch.record_answer(0)
    said = "no Agent is connected: the ranks receive SIGTERM, and have 57 s to save and exit"
    assert caplog.records[-1].getMessage() == said
    assert stage.watch.exit_left_s == 60 - EXIT_MARGIN_S - 1
    stage.loop.go(100)
    assert stage.watch.exit_left_s == 0
