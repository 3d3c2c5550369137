"""A warning that a flood repeats is one line in a while."""

import logging

import pytest

from lighthouse_runtime.timing.pacing import SparseLog


def test_what_was_left_out_is_counted_in_the_next_line(caplog: pytest.LogCaptureFixture):
    now = 5.0
    log = SparseLog(logging.getLogger("flood"), "flooded", every_s=10, clock=lambda: now)
    for now in (5.0, 6.0, 14.9, 15.0, 30.0):
        log.warning("refused: %s", now)
    assert [record.getMessage() for record in caplog.records] == [
        "refused: 5.0",
        "refused: 15.0 (2 more such lines were left out before)",
        "refused: 30.0",
    ]
