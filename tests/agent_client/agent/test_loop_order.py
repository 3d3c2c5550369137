"""Which zero_grad() begins a step, against a model of what loops do: every order, from the first call on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_client.agent.rules.loop_order import ZeroGradOrder

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
                began.append(order.zeroes(has_computed=has_computed, forward_begins=False))
            elif iteration >= skipped:
                order.steps()
                has_computed = False
    assert all(begins is not ends_loop for begins in began)


@given(st.lists(st.sampled_from(["zero", "compute", "step"])))
def test_where_a_forward_pass_begins_the_step_no_zero_grad_does(calls: list[str]) -> None:
    """A loop that zeroes before it begins and at its end makes the same calls as one that zeroes at its top."""
    order, has_computed = ZeroGradOrder(), False
    for call in calls:
        if call == "zero":
            assert not order.zeroes(has_computed=has_computed, forward_begins=True)
        elif call == "step":
            order.steps()
        has_computed = call == "compute" or (has_computed and call == "zero")


def test_each_optimizer_of_a_gan_has_an_order_of_its_own() -> None:
    first, second = ZeroGradOrder(), ZeroGradOrder()
    assert first.zeroes(has_computed=False, forward_begins=False)
    first.steps()
    second.steps()
    assert not second.zeroes(has_computed=False, forward_begins=False)
    assert first.zeroes(has_computed=False, forward_begins=False)
