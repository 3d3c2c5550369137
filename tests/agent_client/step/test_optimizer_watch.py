"""What of a script's objects does not go with replica groups."""

import gc
import logging

import pytest
from torch.utils.data import DistributedSampler

from agent_client.step.script_check import warn_of_split_samplers


@pytest.mark.parametrize(
    ("replicas", "shuffle", "is_told"),
    [(2, True, True), (1, True, True), (4, True, False), (2, False, False)],
    ids=["of the group", "of one", "of all groups", "of an evaluation"],
)
def test_data_that_are_divided_among_the_ranks_of_one_group(
    caplog: pytest.LogCaptureFixture, replicas: int, shuffle: bool, is_told: bool
) -> None:
    gc.collect()  # samplers of other tests
    sampler = DistributedSampler(range(100), replicas, 0, shuffle=shuffle)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        warn_of_split_samplers(2, 2)
    told = f"divides its 100 samples among the {replicas} ranks of this replica group only: each of the 2 groups"
    assert (told in caplog.text) == is_told, sampler
