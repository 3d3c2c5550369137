"""What a library counts: epochs are of samples over all groups, and the mean of a step is that of all its batches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agent_client.training.sampler import StepSampler
from tests.agent_client.clusters import PRELOADED, Cluster, read_events
from tests.agent_client.integrations.counting_script import BATCH_SIZE, RATE, SAMPLES, Data, Net
from tests.agent_client.integrations.libraries import require
from tests.agent_client.ranks import RankServer

STEPS = 8
GROUPS = 2


def trained_by_one(batches: int, *, has_gaps: bool) -> tuple[list[float], list[int]]:
    """(the weights after STEPS of so many batches each, in one process; the steps that end an epoch)"""
    net, data = Net(), Data(has_gaps=has_gaps)
    sgd = torch.optim.SGD(net.parameters(), lr=RATE)
    sampler = StepSampler(SAMPLES, BATCH_SIZE, None)  # type: ignore[arg-type]
    for step in range(STEPS):
        indices = torch.cat([sampler.batch(number) for number in range(step * batches, (step + 1) * batches)])
        joined = {name: torch.stack([data[index][name] for index in indices.tolist()]) for name in ("x", "labels")}
        sgd.zero_grad()
        net(**joined)["loss"].backward()
        sgd.step()
    used = [step * batches * BATCH_SIZE // SAMPLES for step in range(STEPS + 1)]
    ends = [step for step in range(1, STEPS + 1) if used[step] > used[step - 1]]
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).tolist(), ends


def told(events: list[dict[str, Any]], what: str) -> list[int]:
    return [event[what] for event in events if what in event]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
def test_as_one_process_with_all_batches(tmp_path: Path, library: str) -> None:
    """Accumulated, and with three microbatches for two groups, too."""
    require(library)
    script = Path(__file__).with_name("counting_script.py")
    with RankServer(*PRELOADED, f"agent_client.integrations.{library}") as forks:
        for accumulate, constant in [(1, 0), (2, 0), (2, 3)]:
            folder = tmp_path / f"{accumulate}-{constant}"
            folder.mkdir()
            arguments = [library, "--accumulate", str(accumulate), "--constant", str(constant)]
            with Cluster(
                forks,
                folder,
                groups=GROUPS,
                ranks=1,
                pace_s=0.0,
                script=script,
                arguments=arguments,
                steps=STEPS,
                min_replicas=GROUPS,
            ) as cluster:
                cluster.start_lighthouse()
                cluster.start_groups(*cluster.groups)
                cluster.wait_ended()
                batches = accumulate * (constant or GROUPS)
                weights, ends = trained_by_one(batches, has_gaps=library == "transformers")
                for group in cluster.groups:
                    events = read_events(cluster.events(group, 0))
                    assert events[-1]["weights"] == pytest.approx(weights, abs=1e-9), (accumulate, constant)
                    assert events[-1]["data"]["is_exact"]
                    assert events[-1]["data"]["samples"] == STEPS * batches * BATCH_SIZE
                    if library == "accelerate":
                        continue
                    at = sorted({*ends, STEPS})
                    assert told(events, "saved") == at, (accumulate, constant)
                    # Lightning does not validate where max_steps ends an epoch.
                    assert told(events, "validated") == (at if library == "transformers" else ends)
                    assert told(events, "logged") == (at if library == "transformers" else [])
                    epochs = [event["epoch"] for event in events if "validated" in event]
                    of_samples = [step * batches * BATCH_SIZE / SAMPLES for step in at]
                    if library == "transformers":
                        assert epochs == pytest.approx(of_samples)
                    else:
                        assert epochs == [int(step * batches * BATCH_SIZE / SAMPLES) - 1 for step in ends]
