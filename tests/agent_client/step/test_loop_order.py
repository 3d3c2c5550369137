"""Which zero_grad() begins a step, against a model of what loops do: every order, from the first call on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_client.step.rules.loop_order import PassOrder, ZeroGradOrder

LOOPS = {"zero compute step": False, "compute step zero": True, "compute zero step": True, "compute step": True}


@pytest.mark.parametrize(("loop", "ends_loop"), LOOPS.items())
@given(computes=st.integers(1, 4), times=st.integers(1, 5), skipped=st.integers(0, 2))
def test_the_first_call_tells_where_a_loop_zeroes(
    loop: str, ends_loop: bool, computes: int, times: int, skipped: int
) -> None:
    """Also where it accumulates, and where a GradScaler skips the first steps."""
    order, has_computed, began = ZeroGradOrder(), False, list[bool]()
    for iteration in range(skipped + times):
        for call in loop.replace("compute", " ".join(["compute"] * computes)).split():
            if call == "compute":
                has_computed = True
            elif call == "zero":
                began.append(order.should_begin_step(has_computed=has_computed, can_forward_begin=False))
            elif iteration >= skipped:
                order.record_optimizer_step()
                has_computed = False
    assert all(begins is not ends_loop for begins in began)


@given(st.lists(st.sampled_from(["zero", "compute", "step"])))
def test_where_a_forward_pass_begins_the_step_no_zero_grad_does(calls: list[str]) -> None:
    """A loop that zeroes before it begins and at its end makes the same calls as one that zeroes at its top."""
    order, has_computed = ZeroGradOrder(), False
    for call in calls:
        if call == "zero":
            assert not order.should_begin_step(has_computed=has_computed, can_forward_begin=True)
        elif call == "step":
            order.record_optimizer_step()
        has_computed = call == "compute" or (has_computed and call == "zero")


def test_each_optimizer_of_a_gan_has_an_order_of_its_own() -> None:
    first, second = ZeroGradOrder(), ZeroGradOrder()
    assert first.should_begin_step(has_computed=False, can_forward_begin=False)
    first.record_optimizer_step()
    second.record_optimizer_step()
    assert not second.should_begin_step(has_computed=False, can_forward_begin=False)
    assert first.should_begin_step(has_computed=False, can_forward_begin=False)


class Script:
    """Calls of one module's PassOrder, as the Agent makes them. `left_out` counts what was concluded."""

    def __init__(self) -> None:
        self.order, self.step, self.ended, self.left_out = PassOrder(), 0, 0, 0
        self.was_committed = False
        self.sync()

    def sync(self) -> None:
        self.order.sync(step=self.step, ended=self.ended, was_committed=self.was_committed)

    def forward(self, *, is_reset: bool = False) -> None:
        self.sync()
        if self.order.has_reduced:
            wrong = is_reset and self.order.record_forward_after_reset()
        else:
            wrong = self.order.has_abandoned_step()
        if wrong:
            self.left_out += 1
            self.end(is_committed=False)
            self.order.record_discard()
            self.sync()
        self.order.record_forward()

    def passes(self, count: int = 1, *, is_reset: bool = False) -> "Script":
        """Forward and backward."""
        for number in range(count):
            self.forward(is_reset=is_reset and number > 0)
            self.order.record_reduction()
        return self

    def end(self, *, is_committed: bool = True) -> None:
        self.ended += 1
        self.was_committed = is_committed
        self.step += is_committed


class TestPassOrder:
    def test_a_reset_after_a_backward_pass_is_a_step_left_out(self):
        script = Script()
        script.passes().end()
        script.passes().forward(is_reset=True)
        assert script.left_out == 1

    def test_in_the_next_step_as_well(self):
        """The group has healed in between: it is no second try of the same step."""
        script = Script()
        script.passes().end()
        script.passes().forward(is_reset=True)
        script.step += 1
        script.order.record_reduction()
        script.forward(is_reset=True)
        assert script.left_out == 2

    @given(st.integers(1, 5))
    def test_a_second_forward_pass_without_a_backward_pass_is_one_too(self, usual: int):
        script = Script()
        for _ in range(usual):
            script.forward()
        script.order.record_reduction()
        script.end()
        for _ in range(usual):
            script.forward()
        assert script.left_out == 0
        script.forward()
        assert script.left_out == 1

    def test_nothing_is_concluded_before_a_step_is_committed(self):
        script = Script()
        for _ in range(5):
            script.passes(2, is_reset=True)
            script.forward()
            script.forward()
            script.order.record_reduction()
        script.end(is_committed=False)
        script.passes(2, is_reset=True)
        assert script.left_out == 0

    @given(st.integers(1, 4), st.booleans(), st.integers(1, 4))
    def test_what_a_script_does_in_each_step_is_usual(self, passes: int, is_reset: bool, forwards: int):
        script = Script()
        for _ in range(4):
            for _ in range(forwards - 1):
                script.forward()
            script.passes(passes, is_reset=is_reset).end()
        assert script.left_out == 0

    @given(st.integers(2, 300))
    def test_a_script_that_begins_to_do_more_loses_a_few_attempts_and_then_none(self, forwards: int):
        """It repeats the step until it is committed, with all its forward passes."""
        script = Script()
        script.passes().end()
        for _ in range(2):
            tried = -1
            while tried != script.left_out and script.left_out < 50:
                tried = script.left_out
                for _ in range(forwards):
                    script.forward()
            script.order.record_reduction()
            script.end()
            before, script.left_out = script.left_out, 0
            assert before <= forwards.bit_length() + 1
            forwards = forwards if before else 1
        assert script.left_out == 0

    def test_one_that_begins_to_start_over_loses_one(self):
        script = Script()
        script.passes().end()
        script.passes(2, is_reset=True)
        assert script.left_out == 1, "in the second attempt of the same step it may"
        script.passes(2, is_reset=True).end()
        script.passes(3, is_reset=True).end()
        assert script.left_out == 1

    def test_without_counts_only_gradients_tell(self):
        script = Script()
        script.order.counts = False
        script.passes().end()
        for _ in range(5):
            script.forward()
        assert script.left_out == 0
