"""The model keeps its promises, breaks them where a rule is left out, and allows what is simulated."""

from dataclasses import replace
from functools import cache

import pytest

from lighthouse_protocol.messages import session
from tests.model.bounds import QUICK, SLOW, Bounds, check, report
from tests.model.conformance import NotAllowed, Sent, check_trace, until_end
from tests.model.defects import BELOW_THE_MODEL, DEFECTS, Defect
from tests.model.simulated import planted_defects, trace_of

PROMISES = {"S1", "S2", "S3", "S4", "S6", "S7", "S9", "S10", "S11", "S14", "L1", "L2"}


explored = cache(check)


@pytest.mark.parametrize("bounds", QUICK, ids=str)
def test_promises_hold_under_one_fault(bounds: Bounds):
    found, _ = explored(bounds)
    assert not found.violation, report(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bounds", SLOW, ids=str)
def test_promises_hold_under_two_faults_or_with_three_groups(bounds: Bounds):
    found, _ = check(bounds)
    assert not found.violation, report(found)


SLOW_TO_FIND = ("common_by_name", "a_branch_wins")


@pytest.mark.parametrize(
    "defect",
    [pytest.param(d, marks=pytest.mark.slow if d.weak in SLOW_TO_FIND else ()) for d in DEFECTS],
    ids=lambda defect: f"{defect.promise} {defect.weak}",
)
def test_a_left_out_rule_breaks_its_promise(defect: Defect):
    found, _ = check(defect.bounds, defect.weak.split(), [defect.promise])
    assert found.violation.startswith(f"{defect.promise} ")
    assert report(found).startswith(found.violation)


def test_each_promise_can_break_and_is_checked():
    assert {defect.promise for defect in DEFECTS} == PROMISES
    checked = {"L1", "L2"}
    for bounds in QUICK:
        checked |= explored(bounds)[1].checked.keys()
    assert checked == PROMISES


def test_each_planted_defect_of_the_simulator_is_planted_here_or_below_the_model():
    here = {name for defect in DEFECTS for name in defect.stands_for.split()}
    below = {name for names in BELOW_THE_MODEL.values() for name in names}
    assert not here & below
    assert planted_defects() <= here | below


@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 50, 10)], ids=str)
def test_simulated_runs_are_allowed(seeds: range):
    for seed in seeds:
        check_trace(trace_of(seed))


# -- traces that are refused


def _is_refused(trace: list[Sent]) -> bool:
    try:
        check_trace(trace)
    except NotAllowed:
        return True
    return False


def _resumed(trace: list[Sent]) -> list[int]:
    return [n for n, (_, _, m) in enumerate(trace) if isinstance(m, session.QuorumOrder) and m.phase == "resumed"]


def _resumes_higher(trace: list[Sent]) -> list[Sent]:
    """The lighthouse resumes a quorum up to a step that no member has granted."""
    n = _resumed(trace)[0]
    who, to, order = trace[n]
    return [*trace[:n], (who, to, replace(order, upto=order.upto + 1)), *trace[n + 1 :]]


def _resumes_unasked(trace: list[Sent]) -> list[Sent]:
    """A manager resumes a quorum, and the lighthouse has not ordered that."""
    orders = (session.QuorumOrder, session.HeartbeatAck, session.Welcome)

    def resumes(message: object) -> bool:
        order = message if isinstance(message, session.QuorumOrder) else getattr(message, "order", None)
        return isinstance(message, orders) and order is not None and order.phase == "resumed"

    return [sent for sent in trace if not resumes(sent[2])]


def _skips_a_step(trace: list[Sent]) -> list[Sent]:
    """A rank is let into the step after the next."""
    changed: list[Sent] = []
    for who, to, message in trace:
        if isinstance(message, tuple) and message[0] == "on_decision" and message[2] is not None and len(changed) > 20:
            following = replace(message[2], max_step=message[2].max_step + 1)
            return [*changed, (who, to, (*message[:2], following)), *trace[len(changed) + 1 :]]
        changed.append((who, to, message))
    return trace


def _commits_alone(trace: list[Sent]) -> list[Sent]:
    """A member of a quorum never takes part in a step, and the others commit it."""
    first = next(
        m[1] for _, _, m in trace if isinstance(m, tuple) and m[0] == "on_quorum" and len(m[1].replica_ids) > 1
    )
    silent = f"{first.replica_ids[0]}."
    return [s for s in trace if not (isinstance(s[2], tuple) and s[1].startswith(silent))]


def _goes_back(trace: list[Sent]) -> list[Sent]:
    """A join names an older state than the group has committed."""
    for n, (who, to, message) in enumerate(trace):
        if isinstance(message, session.JoinRequest) and message.participant.step > 1:
            older = replace(message.participant, step=message.participant.step - 1)
            return [*trace[:n], (who, to, replace(message, participant=older)), *trace[n + 1 :]]
    return trace


@pytest.mark.parametrize("change", [_resumes_higher, _resumes_unasked, _skips_a_step, _commits_alone, _goes_back])
def test_a_changed_trace_is_refused(change):
    tried = refused = 0
    for seed in range(12):
        trace = list(until_end(trace_of(seed)))
        if _resumed(trace) and (changed := change(trace)) != trace:
            tried += 1
            refused += _is_refused(changed)
    assert tried
    assert refused == tried
