"""The example does what it says."""

import re

import pytest

from tests.processes import Process


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_raise_and_a_kill_of_six_and_two() -> None:
    code = "import runpy; runpy.run_module('examples.restart_wrapper', run_name='__main__')"
    # Unbuffered, Python writes the end of a line by itself, and ten processes share this output.
    with Process(code, env={"PYTHONUNBUFFERED": ""}) as example:
        assert example.wait(300) == 0, example.log()
        log = example.log()
    # Who is slow to begin an iteration may learn that it is over before it does.
    assert re.findall(r"^iteration 0: rank \d of 6$", log, re.MULTILINE)
    assert "interrupted: slot 2" in log
    assert sorted(re.findall(r"^iteration 2: rank (\d) of 6$", log, re.MULTILINE)) == list("012345")
    assert len(re.findall(r"^rank \d has finished iteration 2$", log, re.MULTILINE)) == 6
    assert log.count("a spare to the end") == 1
