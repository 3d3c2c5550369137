"""What the HF Trainer and its callbacks count heals: all groups stop at the same step, with the same best model."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agent_client.clusters import PRELOADED, Cluster, read_events
from tests.agent_client.integrations.counting_script import EVALUATED_EVERY
from tests.agent_client.integrations.libraries import require
from tests.agent_client.ranks import RankServer

PATIENCE = 20


def make_trainer(folder: Path) -> Any:
    library, ours = map(importlib.import_module, ("transformers", "agent_client.integrations.transformers"))
    args = library.TrainingArguments(output_dir=str(folder), max_steps=9, use_cpu=True, report_to="none")
    stopping = library.EarlyStoppingCallback(PATIENCE)
    return ours.FaultTolerantTrainer(model=torch.nn.Linear(3, 2), args=args, callbacks=[stopping])


def state_of(trainer: Any) -> Any:
    return importlib.import_module("agent_client.integrations.transformers")._Progress(trainer)


def stopping_of(trainer: Any) -> Any:
    return next(each for each in trainer.callback_handler.callbacks if hasattr(each, "early_stopping_patience"))


def test_what_a_trainer_counts_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    require("transformers")
    source, healed = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b")
    best = tmp_path / "a" / "checkpoint-3"
    best.mkdir(parents=True)
    progress = state_of(source)
    empty = progress.state_dict()
    source.state.log_history += [{"eval_loss": float("nan"), "step": 3}, {"loss": 0.5, "step": 4}]
    source.state.best_metric, source.state.best_global_step = 0.25, 3
    source.state.best_model_checkpoint = str(best)
    stopping_of(source).early_stopping_patience_counter = 2
    sent = progress.state_dict()
    assert progress.state_dict()["log"] is sent["log"], "the log is written anew only when it grows"

    state_of(healed).load_state_dict(sent)
    state = healed.state
    assert [entry["step"] for entry in state.log_history] == [3, 4]
    assert (state.best_metric, state.best_global_step, state.best_model_checkpoint) == (0.25, 3, str(best))
    assert stopping_of(healed).early_stopping_patience_counter == 2
    own = tmp_path / "b" / "checkpoint-3"
    own.mkdir(parents=True)
    state_of(healed).load_state_dict(sent)
    assert state.best_model_checkpoint == str(own), "its own comes first"
    own.rmdir()
    best.rmdir()
    state_of(healed).load_state_dict(sent)
    assert state.best_model_checkpoint is None
    assert f"the best model so far is in {best} of the group that this one has healed from" in caplog.text
    state_of(healed).load_state_dict(empty)
    assert (state.log_history, state.best_metric) == ([], None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_that_heals_stops_with_the_others(tmp_path: Path) -> None:
    require("transformers")
    script = Path(__file__).with_name("counting_script.py")
    arguments = ["transformers", "--accumulate", "1", "--patience", str(PATIENCE)]
    with (
        RankServer(*PRELOADED, "agent_client.integrations.transformers") as forks,
        Cluster(
            forks, tmp_path, groups=2, ranks=1, pace_s=0.3, script=script, arguments=arguments, steps=100
        ) as cluster,
    ):
        cluster.start_lighthouse()
        first, late = cluster.groups
        cluster.start_groups(first)
        cluster.wait_steps(first, more=EVALUATED_EVERY + 1, participants=1)
        cluster.start_groups(late)
        cluster.wait_ended()
        of_first, of_late = [read_events(cluster.events(group, 0)) for group in cluster.groups]
    assert next(event["step"] for event in of_late if "step" in event) > EVALUATED_EVERY, "it has healed"
    [ended], [other] = ([each for each in events if "stopped" in each] for events in (of_first, of_late))
    best = int(ended["best"].removeprefix("checkpoint-"))
    assert ended["stopped"] == best + PATIENCE * EVALUATED_EVERY
    assert ended["evaluated"] == list(range(EVALUATED_EVERY, ended["stopped"] + 1, EVALUATED_EVERY))
    names = ("stopped", "best", "evaluated")
    assert [other[name] for name in names] == [ended[name] for name in names]
    assert of_first[-1]["weights"] == of_late[-1]["weights"], "those of the best model"
