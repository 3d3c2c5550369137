"""torchtitan trains with torchft on our control plane: what a group that heals takes over."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_client.integrations.torchtitan import serving_present
from tests.agent_client.clusters import descendants, read_events
from tests.agent_client.integrations.libraries import require
from tests.processes import ROOT, Lighthouse, clean_environment, eventually

RANKS = 2
BEFORE, AFTER = 5, 8
WITHIN_S = 400.0
CONFIG = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}"
[optimizer]
implementation = "foreach"
[lr_scheduler]
warmup_steps = 100
[training]
local_batch_size = 1
seq_len = 32
steps = 100000
dataset = "c4_test"
dataset_path = "{folder}/data"
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
"""
WORDS = [f"word{number}" for number in range(200)]


def test_an_optimizer_is_served_with_its_present_learning_rate() -> None:
    """torchtitan keeps a dictionary that it has made when the optimizer was built."""
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([weight], lr=0.1)
    kept: dict[str, Any] = {"state.w.exp_avg": torch.zeros(2), "param_groups.w.lr": 0.0, "param_groups.w.gone": 7}
    container = SimpleNamespace(optimizers=[adam])
    serve = serving_present(lambda _: kept)
    assert serve(container)["param_groups.w.lr"] == 0.1
    adam.param_groups[0]["lr"] = 0.05
    served = serve(container)
    assert served == kept | {"param_groups.w.lr": 0.05}
    assert served["state.w.exp_avg"] is kept["state.w.exp_avg"]


def write_inputs(folder: Path) -> None:
    """A configuration, a tokenizer of a few words, and texts of them."""
    (folder / "train.toml").write_text(CONFIG.format(folder=folder))
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "data").mkdir()
    drawn = random.Random(0)
    texts = [json.dumps({"text": " ".join(drawn.choices(WORDS, k=60))}) for _ in range(500)]
    (folder / "data" / "data.json").write_text("\n".join(texts))


@contextlib.contextmanager
def group(folder: Path, lighthouse: str, number: int, start: int) -> Iterator[None]:
    """As docs/how-to/torchtitan.md starts one; killed by SIGKILL with all of its processes at the end of the block."""
    own = folder / f"group-{number}-start-{start}"
    own.mkdir()
    environment = clean_environment(
        TORCHFT_LIGHTHOUSE=f"http://{lighthouse}",
        EVENTS=str(own / "rank-$RANK.jsonl"),
        HF_HOME=str(own),
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        RES_OPTIONS="attempts:0",
    )
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    meeting = "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", f"--nproc_per_node={RANKS}"
    options = {
        "job.config_file": folder / "train.toml",
        "job.dump_folder": own,
        "parallelism.data_parallel_shard_degree": RANKS,
        "fault_tolerance.group_size": 2,
        "fault_tolerance.replica_id": number,
        "fault_tolerance.process_group": "gloo",
        "fault_tolerance.min_replica_size": 1,
    }
    script = Path(__file__).with_name("titan_script.py")
    arguments = ["--fault_tolerance.enable", *(f"--{name}={value}" for name, value in options.items())]
    with (own / "log").open("w") as log:
        command = [sys.executable, "-m", "torch.distributed.run", *meeting, str(script), *arguments]
        process = subprocess.Popen(command, cwd=own, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_group_heals_to_the_same_bits(tmp_path: Path) -> None:
    """Local shards of parameters and optimizer, and buffers, in each rank, from the step in which it heals."""
    require("torchtitan", "triton", "torchft", group="torchtitan")
    write_inputs(tmp_path)

    def events(number: int, start: int, rank: int = 0) -> list[dict[str, Any]]:
        return read_events(tmp_path / f"group-{number}-start-{start}" / f"rank-{rank}.jsonl")

    def has_done(count: int, number: int, start: int) -> bool:
        return all(len(events(number, start, rank)) >= count for rank in range(RANKS))

    with (
        Lighthouse("--min-replicas", "1", "--join-timeout", "4s") as lighthouse,
        group(tmp_path, lighthouse.address, 0, 0),
    ):
        with group(tmp_path, lighthouse.address, 1, 0):
            eventually(lambda: has_done(BEFORE, 0, 0) and has_done(BEFORE, 1, 0), "both train", WITHIN_S)
        with group(tmp_path, lighthouse.address, 1, 1):
            eventually(lambda: has_done(AFTER, 1, 1), "the killed one trains again", WITHIN_S)
            newest = events(1, 1)[AFTER - 1]["step"]
            eventually(lambda: events(0, 0)[-1]["step"] >= newest, "its peer has done that step", WITHIN_S)
    for rank in range(RANKS):
        peers = {event["step"]: event for event in events(0, 0, rank)}
        healed = [event for event in events(1, 1, rank) if event["step"] <= newest and event["step"] in peers]
        assert healed[0]["step"] > BEFORE
        assert len(healed) >= AFTER - 1
        assert healed == [peers[event["step"]] for event in healed]
