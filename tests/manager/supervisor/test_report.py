"""When a supervisor that the lighthouse refuses gives up."""

import pytest

from lighthouse_protocol.refusals import DuplicateReplica, LighthouseError, Superseded, WrongState
from manager.supervisor.rules.restart_policy import DUPLICATE_TIMEOUT_S, Report

TAKEN = DuplicateReplica("supervisor g is there")


def silent() -> Report:
    return Report(lambda _: None)


@pytest.mark.parametrize("error", [Superseded("it has a successor"), WrongState("its host is excluded")])
def test_a_refusal_that_no_other_try_mends_is_final(error: LighthouseError):
    assert silent().is_final(error, 0.0)


def test_a_name_that_is_taken_is_asked_for_again_for_a_while():
    """Its predecessor may be gone, and not missed yet."""
    report = silent()
    assert not report.is_final(TAKEN, 7.0)
    assert not report.is_final(TAKEN, 6.9 + DUPLICATE_TIMEOUT_S)
    assert report.is_final(TAKEN, 7.0 + DUPLICATE_TIMEOUT_S)


def test_a_welcome_begins_that_time_anew():
    report = silent()
    assert not report.is_final(TAKEN, 0.0)
    report.welcomed(1.0)
    report.ended(2.0)
    assert not report.is_final(TAKEN, 1.0 + DUPLICATE_TIMEOUT_S)
