"""`lighthouse chaos` with a lighthouse that restarts, as its guide tells users to try."""

import json

import pytest

from lighthouse.cli.chaos import chaos
from lighthouse_protocol.refusals import LighthouseError, NotPermitted, UnknownName, Unreachable
from tests.lighthouse.cli.test_chaos_plan import training
from tests.lighthouse.statuses import status

NO_FAULT = ("--for", "300ms", "--mtbf", "1000h", "--baseline", "600ms", "--seed", "1", "--json")
STATUS = status(training())


@pytest.mark.parametrize("error", [UnknownName("no such job"), Unreachable("gone")])
def test_it_goes_on_when_the_lighthouse_is_back(fake, run, error: LighthouseError):
    fake.answers = [STATUS, STATUS, error, status(), STATUS]
    result = run(chaos, *NO_FAULT)
    assert (result.exit_code, json.loads(result.stdout)["problems"]) == (0, []), result.output
    assert len(fake.calls) >= 4


@pytest.mark.parametrize("options", [("--kinds", "clock"), ("--kinds", "kil"), ("--mtbf", "0s")])
def test_a_wrong_command_line_is_status_2(fake, run, options: tuple[str, str]):
    result = run(chaos, *options)
    assert result.exit_code == 2
    assert options[0] in result.stderr
    assert not fake.calls


def test_it_ends_when_it_may_not_look(fake, run):
    fake.answers = [STATUS, NotPermitted("no role")]
    result = run(chaos, *NO_FAULT)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "Error: no role")
