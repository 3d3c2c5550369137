"""The environment of a rank, and torchrun's options."""

import dataclasses
import shlex

import pytest

from manager.supervisor.rules.machine import Layout
from manager.supervisor.rules.plan import Failure, LaunchPlan, Torchrun, failure_behind, read_torchrun

PLAN = LaunchPlan(
    command=("train",),
    layout=Layout(2, 4),
    host=1,
    replica_id="team/a",
    job="j",
    run="r",
    incarnation="s",
    lighthouse="lh:29510",
    manager="h0:29512",
    master=("h0", 29500),
    max_restarts=3,
    slots=8,
    run_secret="known to s",
    manager_secret="known to the group",
)


def test_a_rank_gets_what_torchrun_would_give_it_and_ours() -> None:
    assert PLAN.environment(6, attempt=2, incarnation="i") == {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LIGHTHOUSE_GROUP_RANK": "",  # an inherited one would count before RANK
        "LIGHTHOUSE_GROUP_WORLD_SIZE": "",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "h0",
        "MASTER_PORT": "29500",
        "LIGHTHOUSE_MANAGER_ADDRESS": "h0:29512",
        "LIGHTHOUSE_MANAGER_SECRET": "known to the group",
        "LIGHTHOUSE_RUN_SECRET": "known to s",
        "REPLICA_GROUP_ID": "team/a",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "r",
        "LIGHTHOUSE_ADDRESS": "lh:29510",
        "LIGHTHOUSE_JOB": "j",
        "LIGHTHOUSE_RUN_ID": "r",
        "LIGHTHOUSE_SLOT": "6",
        "LIGHTHOUSE_WORLD_SIZE": "8",
        "LIGHTHOUSE_INCARNATION": "i",
        "LIGHTHOUSE_ATTEMPT": "2",
        "LIGHTHOUSE_STRIDE": "100",
    }


def told(rank: int, **fields: object) -> dict[str, str]:
    return dataclasses.replace(PLAN, **fields).environment(rank, 1, "i")


def test_spares_are_told_how_many_train() -> None:
    spares = told(0, active=6, min_active=4)
    assert (spares["LIGHTHOUSE_ACTIVE_RANKS"], spares["LIGHTHOUSE_MIN_ACTIVE_RANKS"]) == ("6", "4")


def test_torchrun_s_ranks_are_in_one_process_on_each_host() -> None:
    by_torchrun = [dataclasses.replace(PLAN, torchrun=Torchrun("0", size)) for size in (8, None)]
    assert [[plan.process_of(rank) for rank in (0, 3, 4, 7)] for plan in (PLAN, *by_torchrun)] == [
        [0, 3, 4, 7],
        [0, 0, 1, 1],
        [0, 0, 0, 0],
    ]


def test_torchrun_gives_its_ranks_theirs() -> None:
    below = told(4, torchrun=Torchrun("0", 4), trace_dir="/logs")
    assert not below.keys() & {"RANK", "WORLD_SIZE", "MASTER_PORT", "LIGHTHOUSE_SLOT", "PET_MASTER_PORT"}
    slots = [below[f"LIGHTHOUSE_{name}"] for name in ("SLOT_OFFSET", "WORLD_SIZE", "INCARNATION", "STRIDE")]
    assert slots == ["0", "8", "i", "100"]
    assert (below["LIGHTHOUSE_MANAGER_ADDRESS"], below["LIGHTHOUSE_ATTEMPT"]) == ("h0:29512", "1")
    assert below["LIGHTHOUSE_TRACE_DIR"] == "/logs", "where collectives are logged is told to them, too"


def test_torchrun_meets_where_the_store_is_two_above() -> None:
    below = told(4, torchrun=Torchrun("0", 4), store_port=29502)
    met = [below[name] for name in ("PET_MASTER_ADDR", "PET_MASTER_PORT", "LIGHTHOUSE_STORE_PORT")]
    assert met == ["h0", "29500", "29502"]
    assert below["LIGHTHOUSE_GROUP_RANK"] == below["LIGHTHOUSE_GROUP_WORLD_SIZE"] == "", "its workers have RANK"
    assert "PET_MASTER_PORT" not in told(4, torchrun=Torchrun("0", 4), store_port=31000)


def test_a_rank_that_was_started_by_something_else_keeps_its_place() -> None:
    kept = told(4, keeps_place=True)
    assert not kept.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"}
    assert [kept[name] for name in ("MASTER_ADDR", "MASTER_PORT", "LIGHTHOUSE_SLOT")] == ["h0", "29500", "4"]
    assert (kept["LIGHTHOUSE_GROUP_RANK"], kept["LIGHTHOUSE_GROUP_WORLD_SIZE"]) == ("0", "1")


def test_names_and_slots_of_a_group_among_others() -> None:
    assert dataclasses.replace(PLAN, slot_offset=16).own_slots == (20, 21, 22, 23)
    assert dataclasses.replace(PLAN, torchrun=Torchrun("0", 4), slot_offset=16).own_slots == (18, 19)
    assert PLAN.name == "team/a/1"
    assert dataclasses.replace(PLAN, layout=Layout(1, 4), host=0).name == "team/a"
    assert PLAN.label(6) == "team/a/6"
    assert PLAN.log_name(6, 2) == "team%2Fa/attempt_2/rank_6.log"
    assert dataclasses.replace(PLAN, replica_id="..").log_name(6, 2) == "%2E%2E/attempt_2/rank_6.log", (
        "within the folder"
    )


@pytest.mark.parametrize(
    ("command", "read"),
    [
        ("python train.py --max-restarts 3", None),
        ("torchrun train.py", Torchrun("0", 1)),
        ("/opt/bin/torchrun --nproc-per-node=4 train.py", Torchrun("0", 4)),
        ("torchrun --nproc_per_node 4 --nnodes 2 --max_restarts=3 train.py", Torchrun("3", 8)),
        ("torchrun --nproc-per-node gpu train.py", Torchrun("0", None)),
        ("torchrun --nnodes 1:4 --nproc-per-node 2 train.py", Torchrun("0", None)),
        ("python -m torch.distributed.run --max-restarts 1 train.py", Torchrun("1", 1)),
        ("torchrun --master-port 31000 train.py", Torchrun("0", 1, 31000)),
        ("torchrun --rdzv-endpoint=h:31000 train.py", Torchrun("0", 1, 31000)),
        ("torchrun --standalone train.py", Torchrun("0", 1, 0)),
        ("torchrun --rdzv-backend c10d --rdzv-endpoint h:31000 train.py", Torchrun("0", 1, 0)),
    ],
)
def test_what_is_told(command: str, read: Torchrun | None) -> None:
    assert read_torchrun(shlex.split(command), {"MASTER_PORT": "1"}) == read


def test_a_variable_stands_for_an_option() -> None:
    variables = {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "3", "PET_MASTER_PORT": "31000"}
    assert read_torchrun(["torchrun", "--nproc-per-node", "2", "train.py"], variables) == Torchrun("3", 2, 31000)


def test_the_first_rank_that_failed_stands_behind_torchrun_s_end() -> None:
    stopped = ["[1]:", "  rank      : 0 (local_rank: 0)", "  exitcode  : -15 (pid: 76)  (SIGTERM)"]
    first = ["[0]:", "  host      : h", "  rank      : 9 (local_rank: 1)", "  exitcode  : 130 (pid: 77)"]
    said = ["train.py FAILED", *stopped, "Root Cause (first observed failure):", *first, "  error_file: <N/A>"]
    assert failure_behind(1, said) == Failure(9, 130, 77)
    assert failure_behind(1, ["nothing"]) is None
    assert failure_behind(-15, said) is None
