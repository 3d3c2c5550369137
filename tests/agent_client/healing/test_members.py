"""A heal between members of a quorum, which know its secret, and one that a stranger is a side of."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from agent_client.healing.connection import StateUnavailable
from tests.agent_client.healing.pair import TARGETS, Pair

SECRET, OTHER = "known to the members of the quorum", "known to those of another quorum"


@pytest.mark.parametrize(("source", "target"), [(SECRET, SECRET), (SECRET, OTHER), (SECRET, ""), (OTHER, SECRET)])
def test_a_state_goes_from_member_to_member_only(source: str, target: str, caplog: pytest.LogCaptureFixture):
    with ExitStack() as stack:
        pair = Pair(stack)
        pair.serve(secret=source)
        if source == target:
            pair.fetch(replace(TARGETS, secret=target))
            pair.target.install(pair.machine)
            ours, theirs = pair.weights()
            assert torch.equal(ours, theirs)
            return
        before = pair.weights()[1].clone()
        with pytest.raises(StateUnavailable, match="403|did not prove"):
            pair.fetch(replace(TARGETS, secret=target))
        assert torch.equal(pair.weights()[1], before)
