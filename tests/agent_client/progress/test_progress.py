"""Where a rank is: phases, ticks, waits, steps; what is learned of their times; samples that are never torn."""

import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_client.errors import ConfigurationError
from agent_client.progress.progress import MAX_UNREAD, Progress, TraceFile
from agent_client.progress.rules import WAITING, WARMUP_STEPS, CollectiveIds, Entry, Number
from lighthouse_protocol.messages.progress import (
    MAX_DEPTH,
    MAX_LABEL_CHARS,
    MAX_NAME_CHARS,
    MAX_NAMES,
    OTHER,
    STEP,
    Collective,
    ComputeTotals,
    HealTotals,
    OpenPhase,
    ProgressSample,
)
from lighthouse_protocol.wire.streams import WATCH_REQUESTS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def go(self, by_s: float) -> None:
        self.now += by_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    """Past its first step."""
    made = Progress(clock)
    made.step(0)
    made.step(1)
    return made


def longest(sample: ProgressSample) -> dict[str, float]:
    return {time.name: time.longest_s for time in sample.times}


def seconds(sample: ProgressSample) -> dict[str, float]:
    return {time.name: time.seconds for time in sample.times}


class TestPlace:
    def test_the_first_step_is_over_with_the_second(self, clock: Clock):
        progress = Progress(clock)
        clock.go(2)
        assert progress.sample() == ProgressSample(phases=(OpenPhase(STEP, open_s=2),), still_s=2, is_first=True)
        for number, is_first in ((4, True), (5, False), (6, False)):
            progress.step(number)
            sample = progress.sample()
            assert (sample.step, sample.still_s, sample.is_first) == (number, 0, is_first)

    def test_phases_nest_and_end(self, progress: Progress, clock: Clock):
        with progress.phase("epoch", total=60):
            progress.tick()
            clock.go(5)
            with progress.phase("validation", total=25):
                progress.tick()
                progress.tick()
                clock.go(1)
                phases = progress.sample().phases
            after = progress.sample()
        assert phases[1:] == (OpenPhase("epoch", 1, 60, 6), OpenPhase("validation", 2, 25, 1))
        assert after.innermost == OpenPhase("epoch", 1, 60, 6)
        assert progress.sample().innermost.name == STEP

    def test_a_collective_is_movement_too(self, progress: Progress, clock: Clock):
        clock.go(9)
        with progress.collective(Number(1, 1), "all_reduce"):
            clock.go(4)
            assert progress.sample().still_s == 4
        clock.go(5)
        assert progress.sample().still_s == 5

    def test_one_left_out_of_order_ends_those_inside_it_once(self, progress: Progress):
        outer, inner = progress.phase("outer"), progress.phase("inner")
        with progress.phase("epoch"):
            outer.__enter__()
            inner.__enter__()
            outer.__exit__(None, None, None)
            assert [phase.name for phase in progress.sample().phases] == [STEP, "epoch"]
            inner.__exit__(None, None, None)
            assert [phase.name for phase in progress.sample().phases] == [STEP, "epoch"]

    def test_collectives(self, progress: Progress):
        with pytest.raises(RuntimeError), progress.collective(Number(3, 17, 2), "all_reduce", "[4]", within_group=True):
            assert progress.sample().collective == Collective(3, 17, "all_reduce", "[4]", True, True, 2)
            raise RuntimeError
        assert progress.sample().collective == Collective(3, 17, "all_reduce", "[4]", False, True, 2)
        with progress.collective(Number(1, 2), "all_reduce", (25, 10)):
            assert progress.sample().collective == Collective(1, 2, "all_reduce", "25x10")
        with progress.collective(Number(3, 18), "o" * 999, "s" * 999):
            assert progress.sample().collective == Collective(3, 18, "o" * MAX_NAME_CHARS, "s" * MAX_LABEL_CHARS)


class TestTimes:
    def test_of_a_phase_are_its_own(self, progress: Progress, clock: Clock):
        with progress.phase("epoch"):
            clock.go(1)
            with progress.phase("validation"):
                clock.go(10)
            clock.go(2)
            with progress.waiting_for("rank 0"):
                clock.go(100)
            clock.go(4)
        sample = progress.sample()
        assert seconds(sample) == {WAITING: 100, "epoch": 7, "validation": 10}
        assert longest(sample) == {WAITING: 0, "epoch": 4, "validation": 10}

    def test_are_bounded(self, progress: Progress, clock: Clock):
        for number in range(3 * MAX_NAMES):
            with progress.phase(f"batch {number}"), progress.waiting_for(f"wait {number}"):
                clock.go(1)
        with progress.phase("n" * 500):
            for depth in range(20):
                progress.phase(f"batch {depth}").__enter__()
            sample = progress.sample()
        names = [time.name for time in sample.times]
        assert len(names) <= MAX_NAMES + 1
        assert OTHER in names
        assert seconds(sample)[WAITING] == 3 * MAX_NAMES
        assert len(sample.phases) == MAX_DEPTH
        assert len(Progress(clock).phase("n" * 500).name) == MAX_NAME_CHARS


MOVES = st.lists(st.tuples(st.sampled_from(["enter", "leave", "tick", "step", "wait"]), st.integers(0, 9)), max_size=40)


@given(MOVES)
def test_as_a_plain_stack_says(moves: list[tuple[str, int]]):
    """All time goes to exactly one phase. The open ones are those that were entered and not left, each with its own
    ticks; entered in this step were those that have been since, and those that were open when it began. The longest
    time of a phase is between two marks, of which the first step of a process teaches nothing."""
    clock = Clock()
    progress = Progress(clock)
    started_at = marked_at = clock.now
    blocks: list[Any] = []
    ticks, entered, learned, steps = [0], Counter[str](), dict[str, float](), 0
    for move, amount in moves:
        clock.go(amount)
        if move == "leave" and not blocks:
            continue
        inner = blocks[-1].name if blocks else STEP
        learned[inner] = max(learned.get(inner, 0.0), clock.now - marked_at)
        marked_at = clock.now
        if move in ("enter", "wait"):
            blocks.append(progress.phase("abc"[amount % 3]) if move == "enter" else progress.waiting_for("others"))
            blocks[-1].__enter__()
            ticks.append(0)
            entered[blocks[-1].name] += 1
        elif move == "leave":
            error = ValueError() if amount % 2 else None
            blocks.pop().__exit__(type(error) if error else None, error, None)
            ticks.pop()
        elif move == "step":
            progress.step(amount)
            entered, steps = Counter(block.name for block in blocks), steps + 1
            if steps == 2:
                learned.clear()
        else:
            progress.tick()
            ticks[-1] += 1
    sample = progress.sample()
    assert progress.sample() == sample, "a sample does not change what is sampled"
    opened = [(STEP, ticks[0]), *((block.name, done) for block, done in zip(blocks, ticks[1:], strict=True))]
    named = [each for each in opened if each[0] != "others"]
    assert [(phase.name, phase.done) for phase in sample.phases] == named[-MAX_DEPTH:]
    assert dict(sample.entered) == {name: count for name, count in entered.items() if name != "others"}
    assert bool(sample.waits_for) == any(block.name == "others" for block in blocks)
    assert sample.still_s == clock.now - marked_at
    assert sum(seconds(sample).values()) + sample.still_s == clock.now - started_at
    told = {name: longest_s for name, longest_s in longest(sample).items() if longest_s}
    assert told == {name: longest_s for name, longest_s in learned.items() if longest_s and name != "others"}


def test_samples_are_never_torn():
    """Each round enters `outer`, ticks, enters and leaves `inner`: what a sample shows of them must fit together."""
    progress = Progress()
    progress.step(0)
    progress.step(1)
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            with progress.phase("outer"):
                progress.tick()
                with progress.phase("inner"):
                    progress.tick()

    interval = sys.getswitchinterval()
    trainer = threading.Thread(target=train, daemon=True)
    samples: list[ProgressSample] = []

    def rounds(sample: ProgressSample) -> int:
        return dict(sample.entered).get("outer", 0)

    sys.setswitchinterval(1e-6)
    try:
        trainer.start()
        while len(samples) < 2000 or rounds(samples[-1]) < 100:
            samples.append(progress.sample())
    finally:
        stop.set()
        trainer.join(30)
        sys.setswitchinterval(interval)
    for sample in samples:
        names = [phase.name for phase in sample.phases[1:]]
        entered = dict(sample.entered)
        ahead = rounds(sample) - entered.get("inner", 0)
        assert (names, ahead) in (([], 0), (["outer"], 1), (["outer"], 0), (["outer", "inner"], 0))
        assert names != ["outer", "inner"] or sample.phases[1].done == 1
    assert all(rounds(before) <= rounds(after) for before, after in pairwise(samples))


@pytest.mark.parametrize("mark", ["tick", "phase", "step"])
def test_marks_that_nobody_reads_do_not_pile_up(progress: Progress, clock: Clock, mark: str):
    progress.phase("all").__enter__()
    for number in range(3 * MAX_UNREAD):
        clock.go(1)
        if mark == "phase":
            with progress.phase("part"):
                pass
        else:
            progress.tick() if mark == "tick" else progress.step(number)
        assert len(progress.marks) <= MAX_UNREAD + 1
    sample = progress.sample()
    assert not progress.marks
    assert sample.innermost.done == (3 * MAX_UNREAD if mark == "tick" else 0)
    assert dict(sample.entered).get("part", 0) == (3 * MAX_UNREAD if mark == "phase" else 0)
    assert sample.phases[1].open_s == 3 * MAX_UNREAD


class TestOfTheAgent:
    """What its own thread does beside the script's."""

    def test_what_it_waits_for_is_no_suspicion(self, progress: Progress, clock: Clock):
        with progress.phase("forward"):
            clock.go(5)
            with progress.asking("quorum"):
                clock.go(2)
                sample = progress.sample()
            assert progress.sample().waits_for == ""
        assert (sample.waits_for, sample.innermost.name, sample.still_s) == ("quorum", "forward", 2)
        # the script's own wait is shown first
        with progress.asking("quorum"), progress.waiting_for("rank 0 validation"):
            assert progress.sample().waits_for == "rank 0 validation"

    def test_the_heals_of_the_process_add_up(self, progress: Progress):
        assert progress.sample().healed is None
        progress.activity.heal_received(2.0, 100)
        progress.activity.heal_received(1.0, 50)
        assert progress.sample().healed == HealTotals(2, 3.0, 150)

    def test_what_it_is_busy_with_is_where_the_rank_is(self, progress: Progress, clock: Clock):
        with progress.waiting_for("quorum"), progress.busy("heal"):
            clock.go(3)
            sample = progress.sample()
        assert (sample.waits_for, sample.innermost) == ("", OpenPhase("heal", open_s=3))
        assert progress.sample().innermost.name == STEP


def order(numbers: CollectiveIds, entry: Entry, *, within_group: bool) -> tuple[int, int, int]:
    return numbers.number_of(entry, within_group=within_group)


def test_each_comes_after_the_one_before() -> None:
    numbers = CollectiveIds()
    numbers.begin_quorum(7, numbers.over_groups)
    told = [order(numbers, numbers.inside(), within_group=True) for _ in range(2)]
    for _ in range(2):
        entry = numbers.over()
        told += [order(numbers, entry, within_group=True), order(numbers, entry, within_group=False)]
        told.append(order(numbers, numbers.inside(), within_group=True))
    assert told == sorted(set(told))
    assert told[:4] == [(7, 0, 1), (7, 0, 2), (7, 1, 0), (7, 2, 0)]


def test_a_group_s_own_collectives_move_no_other_group_s_numbers() -> None:
    busy, other = CollectiveIds(), CollectiveIds()
    for _ in range(5):
        busy.inside()
    both = [numbers.number_of(numbers.over(), within_group=False) for numbers in (busy, other)]
    assert both[0] == both[1]


def test_a_new_quorum_counts_anew_from_the_step_that_asked_for_it() -> None:
    veteran, newcomer = CollectiveIds(), CollectiveIds()
    for _ in range(9):
        veteran.over()
    asked_for = veteran.over_groups
    before_the_answer = veteran.inside()
    entry = veteran.over()  # the script goes on while the quorum is asked for
    for numbers, so_many in ((veteran, asked_for), (newcomer, 0)):
        numbers.begin_quorum(3, so_many)
        numbers.begin_quorum(3, so_many + 4)  # the quorum of the next step is the same one
    assert (
        veteran.number_of(entry, within_group=False)
        == newcomer.number_of(newcomer.over(), within_group=False)
        == (3, 2, 0)
    )
    assert veteran.number_of(before_the_answer, within_group=True) == (3, 0, 1)


def test_told_is_what_collectives_are_compared_by() -> None:
    numbers = CollectiveIds()
    numbers.over()
    told = numbers.number_of(numbers.inside(), within_group=True)
    collective = Collective(told.quorum_id, told.number, "broadcast", inner=told.inner)
    assert collective.order == told == (0, 2, 1)


class Steps:
    """Steps of one rank, each with so much work, then so much waiting in a collective until the vote."""

    def __init__(self, progress: Progress, clock: Clock) -> None:
        self.progress, self.clock = progress, clock

    def do(self, *, works_s: float = 1.0, waits_s: float = 0.0, microbatches: int = 1, **ends: bool) -> None:
        self.clock.go(works_s)
        self.progress.enter_reduction()
        with self.progress.collective(Number(1, 2), "all_reduce"):
            self.clock.go(waits_s)
        self.progress.leave_reduction()
        with self.progress.waiting_for("vote"):
            self.clock.go(waits_s)
        ends = {"is_committed": True, "has_healed": False} | ends
        self.progress.compute.end_step(self.clock(), microbatches, **ends)

    @property
    def totals(self) -> ComputeTotals | None:
        return self.progress.sample().computed


class TestComputeTime:
    @pytest.fixture
    def steps(self, progress: Progress, clock: Clock) -> Steps:
        """Of a rank that has warmed up."""
        steps = Steps(progress, clock)
        for _ in range(WARMUP_STEPS):
            steps.do(works_s=600.0)
        assert steps.totals is None
        return steps

    def test_waits_do_not_count(self, steps: Steps):
        for _ in range(5):
            steps.do(works_s=0.5, waits_s=30.0)
        assert steps.totals == ComputeTotals(pytest.approx(2.5), 5)

    def test_the_time_in_which_a_device_still_computes_a_tensor_is_no_wait(self, steps: Steps, progress: Progress):
        progress.enter_reduction()
        steps.clock.go(3.0)  # the collective has not begun
        steps.do(works_s=0.5, waits_s=30.0)
        assert steps.totals == ComputeTotals(pytest.approx(3.5), 1)

    def test_a_collective_beside_the_backward_pass_is_no_wait(self, steps: Steps, progress: Progress, clock: Clock):
        with progress.collective(Number(1, 2), "all_reduce"):
            clock.go(2.0)
        steps.do(works_s=1.0, waits_s=1.0)
        assert steps.totals == ComputeTotals(pytest.approx(3.0), 1)

    def test_of_waits_inside_each_other_the_outer_one_counts(self, steps: Steps, progress: Progress, clock: Clock):
        with progress.waiting_for("outer"):
            clock.go(1.0)
            with progress.waiting_for("inner"):
                clock.go(1.0)
        steps.do(works_s=0.25)
        assert steps.totals == ComputeTotals(pytest.approx(0.25), 1)

    def test_a_reduction_that_never_ends_spoils_no_later_step(self, steps: Steps, progress: Progress):
        progress.enter_reduction()
        progress.compute.end_step(steps.clock(), 1, is_committed=False, has_healed=False)
        steps.do(works_s=2.0)
        assert steps.totals == ComputeTotals(pytest.approx(2.0), 1)

    @pytest.mark.parametrize(
        "passed_over", [{"is_committed": False}, {"microbatches": 0}], ids=["discarded", "skipped"]
    )
    def test_a_step_that_was_discarded_or_whose_batch_was_skipped_does_not_count(
        self, steps: Steps, passed_over: dict[str, Any]
    ):
        steps.do(works_s=9.0, **passed_over)
        steps.do(works_s=2.0, microbatches=3)
        assert steps.totals == ComputeTotals(pytest.approx(2.0), 3)

    def test_after_a_heal_the_first_steps_do_not_count(self, steps: Steps):
        steps.do(works_s=9.0, has_healed=True)
        for _ in range(WARMUP_STEPS):
            steps.do(works_s=9.0)
        assert steps.totals is None
        steps.do(works_s=2.0)
        assert steps.totals == ComputeTotals(pytest.approx(2.0), 1)


@pytest.mark.parametrize(
    "name", ["caf\udce9.bin", "a\nb", "x" * 200, "\ud800" * 100], ids=["bytes", "lines", "long", "all bytes"]
)
def test_a_sample_can_be_sent_whatever_a_phase_is_called(name: str, tmp_path: Path) -> None:
    """A file name that is no UTF-8 has lone surrogates. An error here would close the watch, twice a second."""
    progress = Progress(trace=TraceFile(tmp_path / "trace"))
    for _ in range(2):
        with progress.phase(name), progress.waiting_for(name):
            sample = WATCH_REQUESTS.read(WATCH_REQUESTS.write(progress.sample()))
    assert isinstance(sample, ProgressSample)
    assert [phase.name for phase in sample.phases][:1] == [STEP]
    assert [time.visits for time in sample.times if time.name not in (STEP, WAITING)] == [1]


@pytest.mark.parametrize("total", [2.5, -1, 2**53, 2**70])
def test_a_total_that_is_no_number_of_ticks_is_refused(total: Any) -> None:
    progress = Progress()
    with pytest.raises((ConfigurationError, TypeError)):
        progress.phase("validation", total)
    with progress.phase("validation", 2**53 - 1):
        assert isinstance(WATCH_REQUESTS.read(WATCH_REQUESTS.write(progress.sample())), ProgressSample)
