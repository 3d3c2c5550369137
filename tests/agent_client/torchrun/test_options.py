import pytest

from agent_client.torchrun.handler import NOT_NEEDED, Options


def test_options_have_torchrun_s_names_and_defaults() -> None:
    assert Options.read({}) == Options(600.0, 30.0, 30.0, 60.0, 2.0)
    read = Options.read({"join_timeout": "5", "last_call_timeout": 7, "close_timeout": "0.5", "timeout": 900})
    assert read == Options(join_timeout=5.0, last_call_timeout=7.0, close_timeout=0.5)


@pytest.mark.parametrize("given", ["5", " 5 ", 5, 5.0])
def test_a_value_is_what_torch_s_getters_take_it_for(given: object) -> None:
    """--rdzv-conf gives text; a program gives numbers."""
    assert Options.read({"join_timeout": given}).join_timeout == 5.0


@pytest.mark.parametrize("name", sorted(NOT_NEEDED))
def test_what_other_backends_need_is_accepted(name: str) -> None:
    assert Options.read({name: "anything"}) == Options()


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan", ""])
def test_a_length_of_time_is_a_number_of_seconds(value: str) -> None:
    with pytest.raises(ValueError, match=f"--rdzv-conf join_timeout={value}: must be a number of seconds above 0"):
        Options.read({"join_timeout": value})


def test_an_unknown_option_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no option 'joint_timeout'; its options are close_timeout, .*join_timeout"):
        Options.read({"joint_timeout": "5"})
