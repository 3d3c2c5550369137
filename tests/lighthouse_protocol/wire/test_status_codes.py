"""One table for both ends."""

import inspect

import grpc
import pytest

from lighthouse_protocol import refusals
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    InternalError,
    InvalidRequest,
    LighthouseError,
    NotPermitted,
    WrongState,
)
from lighthouse_protocol.wire.codec import error_of, status_of

CLASSES = [
    cls
    for _, cls in inspect.getmembers(refusals, inspect.isclass)
    if LighthouseError in cls.__bases__  # one made of these goes over the wire as what it is made of
]


@pytest.mark.parametrize("cls", CLASSES)
def test_each_refusal_is_raised_as_what_it_is_on_the_other_side(cls: type[LighthouseError]):
    error = cls("step: is odd")
    again = error_of(status_of(error), str(error))
    assert type(again) is cls
    assert str(again) == "step: is odd"


def test_each_refusal_has_a_status_of_its_own():
    assert len({status_of(cls("x")) for cls in CLASSES}) == len(CLASSES) > 10


@pytest.mark.parametrize("status", [s for s in grpc.StatusCode if s is not grpc.StatusCode.OK])
def test_each_status_is_a_refusal_with_its_words(status: grpc.StatusCode):
    assert isinstance(error_of(status, None), LighthouseError)
    assert str(error_of(status, "because")) == "because"
    assert str(error_of(status, None)) == status.name.lower().replace("_", " ")


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (grpc.StatusCode.CANCELLED, DeadlinePassed),
        (grpc.StatusCode.UNKNOWN, InternalError),
        (grpc.StatusCode.UNAUTHENTICATED, NotPermitted),
    ],
)
def test_statuses_that_others_answer_with(status: grpc.StatusCode, cls: type[LighthouseError]):
    assert type(error_of(status, "x")) is cls


def test_a_defect_is_internal_and_a_more_special_refusal_is_carried_as_its_kind():
    class StepInFlight(WrongState):
        pass

    assert status_of(KeyError("x")) is grpc.StatusCode.INTERNAL
    assert status_of(StepInFlight("x")) is grpc.StatusCode.FAILED_PRECONDITION


def test_a_passed_deadline_is_a_timeout_error():
    assert issubclass(DeadlinePassed, TimeoutError)


def test_bad_input_starts_with_its_field():
    assert str(InvalidRequest("is odd", field="step")) == "step: is odd"
    assert str(InvalidRequest("is odd")) == "is odd"
