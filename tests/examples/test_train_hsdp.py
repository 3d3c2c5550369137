"""The HSDP example as its readers run it: it learns, and a group that is killed heals and ends with the others.

The survivor waits for it, so that it finds somebody to heal from however long its start takes.
"""

import runpy
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.daemons import ROOT
from tests.agent_client.clusters import Cluster, check_all, fork_server, read_events
from tests.processes import eventually

STEPS = 80


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_group_heals_its_shards_and_all_end_with_the_same_weights(tmp_path: Path) -> None:
    script = ROOT / "examples/train_hsdp.py"
    with (
        fork_server() as forks,
        Cluster(forks, tmp_path, groups=2, ranks=2, pace_s=0.02, script=script, steps=STEPS, min_replicas=2) as cluster,
    ):
        cluster.start_lighthouse()
        cluster.start_groups(*cluster.groups)
        cluster.wait_steps(*cluster.groups, more=2, participants=2)
        victim, _ = cluster.groups
        cluster.kill(victim)
        cluster.start_groups(victim)
        eventually(lambda: all(map(cluster.has_ended, cluster.groups)), "all have ended", 120.0)
        assert [cluster.statuses(group) for group in cluster.groups] == [[0, 0], [0, 0]], cluster.log(victim, 0)
        assert cluster.committed(victim)[0]["contributed"]
        ends = [[read_events(cluster.events(group, rank))[-1] for group in cluster.groups] for rank in (0, 1)]
    for rank, of_rank in enumerate(ends):
        assert check_all(tmp_path, str(rank)) > STEPS / 2
        assert {end["finished"] for end in of_rank} == {STEPS}
        assert len({end["hash"] for end in of_rank}) == 1
        assert all(end["accuracy"] > 0.3 for end in of_rank), of_rank


def test_looking_at_the_shards_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """full_tensor() is ALLGATHER_COALESCED to torch's gloo. That name is too long to lie in its std::string itself, and
    two threads of a group assign such names without a lock (ProcessGroupGloo::runLoop, 2.13): both free it."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = runpy.run_path(str(ROOT / "examples/train_hsdp.py"))
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = example["sharded_reader"]()
        adam = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1, 64)).sum().backward()
        adam.step()
        with CommDebugMode() as communication:
            found = list(example["shards"](model, adam))
    finally:
        distributed.destroy_process_group()
    assert len(found) == 4 * len(list(model.parameters()))
    assert communication.get_total_counts() == 0
