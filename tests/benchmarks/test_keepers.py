import pytest

from benchmarks.keepers import percent_text


@pytest.mark.parametrize(("percent", "text"), [(2.44, "2.4% more"), (0.0, "0.0% more"), (-1.66, "1.7% less")])
def test_a_step_that_takes_less_time_is_not_said_to_take_more(percent: float, text: str) -> None:
    assert percent_text(percent) == text
