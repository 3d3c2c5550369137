"""Which checkpoint a rank goes on from; and a job of which every process has died goes on, bit by bit."""

import errno
import itertools
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from agent_client.errors import AgentError
from agent_client.healing.keeper import Keeper
from agent_client.state import files
from agent_client.state.files import write_part
from agent_client.state.snapshot import StateMismatch
from agent_client.state.train_state import TrainState
from agent_client.step.agent import Agent
from agent_client.training import checkpoint_folder
from agent_client.training.checkpoint_folder import CheckpointFolder, Tag, newest_common
from lighthouse_runtime.process.kept_memory import buffer_path, make_buffer
from tests.agent_client import sharded_checkpoint
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank, RankServer, together
from tests.processes import Lighthouse, eventually

ACTOR = "tests.agent_client.keeping_actor:KeepingActor"


def test_the_newest_that_every_rank_holds() -> None:
    one, two, other_two, three = Tag(1, 10), Tag(2, 20), Tag(2, 21), Tag(3, 30)
    assert newest_common([{one, two, three}]) == three
    assert newest_common([{one, two, three}, {one, two}]) == two
    assert newest_common([{one, two}, {one, other_two}]) == one, "the same step of another quorum is another state"
    assert newest_common([{one}, {two}]) is None
    assert newest_common([set(), {two}]) is None


@pytest.fixture
def agent() -> Iterator[Agent]:
    """One rank, which needs no manager as long as it takes no step."""
    with make_agent(1) as it:
        yield it


def make_agent(seed: int, features: int = 3) -> Agent:
    torch.manual_seed(seed)
    model = torch.nn.Linear(features, 2)
    return Agent("127.0.0.1:1", state=TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def at(agent: Agent, step: int, quorum_id: int) -> Agent:
    agent.load_state_dict({"step": step, "tag_quorum_id": quorum_id, "batches_committed": 2 * step})
    return agent


def weights(agent: Agent) -> list[Any]:
    return [parameter.tolist() for parameter in agent.state.model.parameters()]


class TestOneRank:
    def test_there_and_back(self, agent: Agent, tmp_path: Path) -> None:
        path = save(CheckpointFolder(tmp_path, at(agent, 12, 77)))
        assert path == tmp_path / "step-000000000012-quorum-77"
        with make_agent(2) as other:
            assert weights(other) != weights(agent)
            assert CheckpointFolder(tmp_path, other).resume()
            assert weights(other) == weights(agent)
            assert other.state_dict() == {"step": 12, "tag_quorum_id": 77, "batches_committed": 24}
            assert (other.current_step, other.batches_committed) == (12, 24)

    @pytest.mark.parametrize("entry", ["step", "tag_quorum_id", "batches_committed"])
    @pytest.mark.parametrize("value", [-1, 2**53])
    def test_a_number_that_no_run_reaches_is_refused_by_its_entry(self, agent: Agent, entry: str, value: int) -> None:
        before = agent.state_dict()
        with pytest.raises(AgentError, match=rf"^agent\['{entry}'\] of the checkpoint is {value}, not a number"):
            agent.load_state_dict({"step": 1, "tag_quorum_id": 1, "batches_committed": 1, entry: value})
        assert agent.state_dict() == before

    def test_a_checkpoint_with_such_a_number_is_named(self, agent: Agent, tmp_path: Path) -> None:
        agent.internals.machine.finish_install(2**53, 7, 1)
        path = save(CheckpointFolder(tmp_path, agent))
        with pytest.raises(AgentError, match=rf"^{path}: agent\['step'\] of the checkpoint is {2**53}, not"):
            CheckpointFolder(tmp_path, agent).resume()

    def test_without_any(self, agent: Agent, tmp_path: Path) -> None:
        before = weights(agent)
        assert not CheckpointFolder(tmp_path / "new", agent).resume()
        assert (weights(agent), agent.current_step) == (before, 0)

    def test_the_newest_are_kept(self, agent: Agent, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("not ours")
        checkpoints = CheckpointFolder(tmp_path, agent, keep=3)
        save(checkpoints, *range(1, 7))
        own = [f"step-{step:012}-quorum-1" for step in (4, 5, 6)]
        assert names(tmp_path) == ["notes.txt", *own]

    def test_one_written_after_a_step_back_is_kept_too(self, agent: Agent, tmp_path: Path) -> None:
        """A group that resumed and healed may write a lower step than the files that it left: those go."""
        path = save(CheckpointFolder(tmp_path, agent), 2, 8, 9, 3)
        assert [path.name] == names(tmp_path)

    def test_a_future_that_was_given_up_does_not_count(self, agent: Agent, tmp_path: Path) -> None:
        damage(save(CheckpointFolder(tmp_path, agent, keep=3), 1, 2, 3, quorum_id=7))
        checkpoints = CheckpointFolder(tmp_path, agent)
        assert checkpoints.resume()
        assert agent.current_step == 2
        save(checkpoints, 3, quorum_id=8)
        assert names(tmp_path) == ["step-000000000002-quorum-7", "step-000000000003-quorum-8"]

    def test_a_run_that_does_not_resume_leaves_those_of_others(
        self, agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(CheckpointFolder(tmp_path, agent), 50)
        with make_agent(2) as other:
            save(CheckpointFolder(tmp_path, other), 1, 2, 3, quorum_id=9)
        assert steps_in(tmp_path) == [2, 3, 50]
        assert "holds checkpoints up to step 50 that this run has not resumed" in caplog.text

    @pytest.mark.parametrize("is_damaged", [False, True])
    def test_a_run_that_goes_on_after_it_could_not_resume_leaves_them_too(
        self, agent: Agent, tmp_path: Path, *, is_damaged: bool
    ) -> None:
        """They may be of another model, or can be repaired."""
        path = save(CheckpointFolder(tmp_path, agent), 50)
        if is_damaged:
            damage(path)
        with make_agent(2, features=3 if is_damaged else 4) as other:
            checkpoints = CheckpointFolder(tmp_path, other)
            with pytest.raises(AgentError if is_damaged else StateMismatch):
                checkpoints.resume()
            save(checkpoints, 1, 2, 3, 60, 70, quorum_id=9)
        assert steps_in(tmp_path) == [50, 60, 70]

    def test_a_folder_that_cannot_be_read_at_the_first_save_keeps_those_of_others(
        self, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(CheckpointFolder(tmp_path, at(agent, 50, 5)))
        with make_agent(2) as other:
            checkpoints = CheckpointFolder(tmp_path, at(other, 1, 9))
            with monkeypatch.context() as patch:
                patch.setattr(CheckpointFolder, "_held", raising(OSError(errno.EIO, "bad disk")))
                assert checkpoints.save() is None
            for step in (2, 3, 4):
                at(other, step, 9)
                save(checkpoints)
        assert [int(name[5:17]) for name in names(tmp_path)] == [3, 4, 50]

    def test_one_with_a_dtype_that_this_torch_lacks_is_named(
        self, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(CheckpointFolder(tmp_path, at(agent, 1, 1)))
        known = {name: dtype for name, dtype in files.DTYPES.items() if dtype is not torch.float32}
        monkeypatch.setattr(files, "DTYPES", known)
        with make_agent(2) as other, pytest.raises(AgentError, match=r"torch \d[^ ]* has no dtype float32"):
            CheckpointFolder(tmp_path, other).resume()

    def test_a_damaged_one_is_passed_over_by_name(
        self, agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = save(CheckpointFolder(tmp_path, agent), 1, 2)
        damage(path)
        with make_agent(2) as other:
            assert CheckpointFolder(tmp_path, other).resume()
            assert other.current_step == 1
        assert f"skipped a checkpoint: {path} cannot be used: {path}/rank-0/__0_0.distcp is damaged" in caplog.text

    def test_files_that_cannot_be_used_are_an_error(self, agent: Agent, tmp_path: Path) -> None:
        path = save(CheckpointFolder(tmp_path, agent), 1)
        with make_agent(2) as other:
            path.rename(tmp_path / "step-000000000009-quorum-1")
            with pytest.raises(AgentError, match="holds step 1, which does not match its name.* or remove the files"):
                CheckpointFolder(tmp_path, other).resume()
            path = path.with_name("step-000000000009-quorum-1").rename(path)
            damage(path)
            with pytest.raises(AgentError, match=r"no checkpoint can be used by all ranks .*rank 0: none.*is damaged"):
                CheckpointFolder(tmp_path, other).resume()
            assert other.current_step == 0

    def test_one_of_another_model_ends_it_by_name(self, agent: Agent, tmp_path: Path) -> None:
        path = save(CheckpointFolder(tmp_path, agent), 1)
        with make_agent(2, features=4) as other:
            before = weights(other)
            with pytest.raises(StateMismatch, match=rf"{path}.*\n.*\['weight'\]: shape \(2, 4\) here"):
                CheckpointFolder(tmp_path, other).resume()
            assert (weights(other), other.current_step) == (before, 0)

    def test_fewer_than_two_are_refused(self, agent: Agent, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="at least two"):
            CheckpointFolder(tmp_path, agent, keep=1)

    @pytest.mark.parametrize("kept", [2, 3, 4])
    def test_what_is_kept_in_memory_is_loaded_if_it_is_newer(self, agent: Agent, tmp_path: Path, kept: int) -> None:
        save(CheckpointFolder(tmp_path, agent), 3, quorum_id=7)
        with restarted(agent, kept) as other:
            assert CheckpointFolder(tmp_path, other).resume()
            assert (weights(other), other.current_step) == (weights(agent), max(3, kept))
            assert other.batches_committed == (9 if kept > 3 else 6)

    def test_what_is_kept_in_memory_is_loaded_if_a_newer_checkpoint_is_damaged(
        self, agent: Agent, tmp_path: Path
    ) -> None:
        damage(save(CheckpointFolder(tmp_path, agent), 50, 100, quorum_id=7))
        with restarted(agent, 90) as other:
            checkpoints = CheckpointFolder(tmp_path, other)
            assert checkpoints.resume()
            assert (weights(other), other.current_step) == (weights(agent), 90)
            assert other.internals.restore_kept() is False, "it is as new as the state"
            save(checkpoints, 110, quorum_id=8)
        assert steps_in(tmp_path) == [50, 110]

    def test_random_numbers_continue(self, agent: Agent, tmp_path: Path) -> None:
        def draw() -> tuple[Any, ...]:
            values = random.random(), random.gauss(), np.random.rand(), np.random.randn()
            return *values, torch.rand(3).tolist(), torch.randn(1).item()

        draw()  # a second Gaussian is at hand in Python and NumPy
        save(CheckpointFolder(tmp_path, agent), 1)
        expected = draw()
        with make_agent(2) as other:
            assert CheckpointFolder(tmp_path, other).resume()
            assert draw() == expected

    def test_what_is_saved_is_the_state_at_the_call(
        self, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        may_write = threading.Event()

        def write_later(*arguments: Any, **options: Any) -> None:
            assert may_write.wait(60)
            write_part(*arguments, **options)

        monkeypatch.setattr(checkpoint_folder, "write_part", write_later)
        checkpoints = CheckpointFolder(tmp_path, at(agent, 1, 1))
        before = weights(agent)
        assert checkpoints.save()
        assert not checkpoints.wait(0.0), "the step is not blocked while the disk writes"
        with torch.no_grad():
            next(agent.state.model.parameters()).zero_()
        may_write.set()
        agent.close()  # waits for it
        with make_agent(2) as other:
            assert CheckpointFolder(tmp_path, other).resume()
            assert weights(other) == before

    def test_a_save_that_is_due_too_early_is_left_out(
        self, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        may_write = threading.Event()
        monkeypatch.setattr(checkpoint_folder, "BUSY_WAIT_S", 0.01)
        monkeypatch.setattr(checkpoint_folder, "write_part", lambda *_, **__: may_write.wait(60))
        checkpoints = CheckpointFolder(tmp_path, at(agent, 1, 1))
        try:
            assert checkpoints.save()
            assert checkpoints.save() is None
        finally:
            may_write.set()
        assert "the save before is still running after 0.01 s. Training continues" in caplog.text

    def test_a_failure_costs_a_warning_once_per_kind(
        self, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        checkpoints = CheckpointFolder(tmp_path, agent)
        save(checkpoints, 1)
        for number in (errno.ENOSPC, errno.ENOSPC, errno.EIO):
            with monkeypatch.context() as patch:
                patch.setattr(files, "sync_folder", raising(OSError(number, os.strerror(number))))
                save(checkpoints, 2)
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warned) == 2
        assert "step 2 was not written: OSError: [Errno 28] No space left on device. Training continues" in warned[0]
        assert "it has to hold 3 checkpoints" in warned[0]
        assert "[Errno 5]" in warned[1]
        save(checkpoints, 3)
        assert steps_in(tmp_path) == [1, 3]

    @pytest.mark.slow
    def test_what_a_killed_save_has_left_is_removed(self, tmp_path: Path, agent: Agent) -> None:
        save(CheckpointFolder(tmp_path, agent), 7)
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline() == "begun\n"
            eventually(lambda: any(tmp_path.glob(".step-*/rank-0.saving/*")), "a save is under way")
            process.kill()
        assert len(names(tmp_path)) == 2
        checkpoints = CheckpointFolder(tmp_path, agent)
        assert checkpoints.resume()
        assert names(tmp_path) == ["step-000000000007-quorum-1"]


KILLED = """
import sys, torch
from agent_client import Agent, CheckpointFolder, TrainState
model = torch.nn.Linear(4000, 10000)
agent = Agent("127.0.0.1:1", state=TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)))
agent.load_state_dict({"step": 8, "tag_quorum_id": 1, "batches_committed": 8})
checkpoints = CheckpointFolder(sys.argv[1], agent)
checkpoints.save()
print("begun", flush=True)
sys.stdin.read()
"""


def save(checkpoints: CheckpointFolder, *steps: int, quorum_id: int = 1) -> Path:
    """At each of the steps, or where the Agent is. The path of the last one."""
    for step in steps or [None]:
        if step is not None:
            at(checkpoints._agent, step, quorum_id)
        path = checkpoints.save()
        assert path
        assert checkpoints.wait(60)
    return path


@contextmanager
def restarted(agent: Agent, kept: int) -> Iterator[Agent]:
    """A new process, for which the supervisor has kept the agent's state of that step in memory."""
    place = 1, (buffer_path(make_buffer("a")), buffer_path(make_buffer("b"))), "owner"
    keeper = Keeper(agent.state, *place)
    keeper.keep({"step": kept, "tag_quorum_id": 7, "batches_committed": 9})
    keeper.close()
    with make_agent(2) as other:
        other.internals.keeper = Keeper(other.state, *place)
        yield other


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_in(folder: Path) -> list[int]:
    """Of its complete checkpoints."""
    return [int(name[5:17]) for name in names(folder) if name.startswith("step-")]


def damage(checkpoint: Path) -> None:
    path = checkpoint / "rank-0" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-3])


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


PLACES = ["a/0", "a/1", "b/0", "b/1"]


def start(store: str, server: RankServer, folder: Path, stack: ExitStack) -> tuple[Job, dict[str, Rank]]:
    """Two replica groups of two ranks, each with files of its own, under a lighthouse that remembers nothing."""
    lighthouse = stack.enter_context(Lighthouse("--join-timeout", "2s", "--heartbeat-timeout", "2s"))
    job = Job(lighthouse.address, store, server, folder, stack)
    of_a = job.groups_of(2, "a", actor=ACTOR, folder=str(folder / "files-a"))
    return job, of_a | job.groups_of(2, "b", seed=1, actor=ACTOR, folder=str(folder / "files-b"))


def call(ranks: dict[str, Rank], method: str, *arguments: Any) -> dict[str, Any]:
    return dict(zip(ranks, together(ranks.values(), method, *arguments), strict=True))


def test_all_groups_are_killed_at_different_steps_and_go_on(
    store: str, rank_server: RankServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        job, ranks = start(store, rank_server, tmp_path, stack)
        assert set(call(ranks, "resume").values()).isdisjoint({True})
        together = call(ranks, "steps", 3)
        for process in (ranks.pop("a/0"), ranks.pop("a/1"), job.managers["a"]):
            process.kill()
        of_b = call(ranks, "steps", 6)
        for process in (*ranks.values(), job.managers["b"]):
            process.kill()
    hash_at_5 = {place: next(step["hash"] for step in log if step["step"] == 5) for place, log in of_b.items()}
    for last in (tmp_path / "files-b").glob("step-000000000006-*"):
        shutil.rmtree(last)  # they were killed before both had written that one

    with ExitStack() as stack:
        _, ranks = start(store, rank_server, tmp_path, stack)
        resumed = call(ranks, "resume")
        assert {place: step for place, (_, step, _) in resumed.items()} == dict(zip(PLACES, (3, 3, 5, 5), strict=True))
        expected = {place: together[place][-1]["hash"] for place in ("a/0", "a/1")} | hash_at_5
        assert {place: digest for place, (_, _, digest) in resumed.items()} == expected
        logs = call(ranks, "steps", 8)
    for rank in (0, 1):
        last_of_a, last_of_b = logs[f"a/{rank}"][-1], logs[f"b/{rank}"][-1]
        assert (last_of_a["step"], last_of_a["hash"]) == (8, last_of_b["hash"])
    healed = next(step for step in logs["a/0"] if step["committed"])
    assert (healed["step"], healed["participated"]) == (6, True), "the older group healed from the newer one"
    assert logs["b/0"][0]["participated"]


@pytest.mark.slow
def test_sharded_models_are_resumed_by_any_number_of_ranks(store: str, rank_server: RankServer, tmp_path: Path) -> None:
    def run(ranks: int, steps: int, layout: str = "sharded") -> list[Any]:
        """[step resumed, hash then, last step, hash then], the same in all ranks."""
        key = f"{tmp_path}/{next(Group.lives)}"
        with ExitStack() as stack:
            pending = [
                stack.enter_context(
                    rank_server.start("tests.agent_client.sharded_checkpoint:ShardedCheckpointActor", tmp_path / "log")
                ).begin("run", store, key, rank, ranks, str(tmp_path / "kept"), steps, layout)
                for rank in range(ranks)
            ]
            told = [each.result() for each in pending]
        assert all(each == told[0] for each in told)
        return told[0]

    step, _, end, first = run(2, 3)
    assert (step, end) == (0, 3)
    step, begun, end, second = run(4, 2)
    assert (step, begun, end) == (3, first, 5)
    step, begun, end, third = run(1, 1)
    assert (step, begun, end) == (5, second, 6)
    assert run(1, 0, "plain") == [6, third, 6, third]
    assert run(2, 0) == [6, third, 6, third]


class Weights:
    def __init__(self) -> None:
        self.tensor = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["w"]


class Place(sharded_checkpoint.Internals):
    """Stands for the Agents of the ranks of one group, which are threads: each life has a barrier and a store."""

    def __init__(self, ranks: int) -> None:
        super().__init__(HashStore())
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * ranks


class GroupRank(sharded_checkpoint.Rank):
    def sum_over_group(self, tensor: torch.Tensor) -> torch.Tensor:
        place: Any = self.internals
        place.brought[self.group_rank] = tensor
        place.barrier.wait()
        total = torch.stack(place.brought).sum(0)
        place.barrier.wait()
        return total


class Group:
    """One life of a replica group whose ranks keep checkpoints in `folders`."""

    lives = itertools.count(1)

    def __init__(self, folders: Sequence[Path]) -> None:
        place, ranks = Place(len(folders)), range(len(folders))
        self.ranks: list[Any] = [GroupRank(rank, len(folders), Weights(), place) for rank in ranks]
        self.checkpoints = [CheckpointFolder(folders[rank], self.ranks[rank]) for rank in ranks]
        with ThreadPoolExecutor(len(folders)) as pool:
            pending = [pool.submit(each.resume) for each in self.checkpoints]
            self.errors = [done.exception() for done in pending]
            self.resumed = [done.result() for done in pending if not done.exception()]
        quorum_id = next(self.lives)
        self.step = self.ranks[0].step
        for rank in self.ranks:
            assert rank.step == self.step
            rank.quorum_id = quorum_id

    def save(self, *steps: int, ranks: Collection[int] | None = None) -> None:
        """`ranks`: the others die before they have saved."""
        for self.step in steps:
            for rank, (agent, checkpoints) in enumerate(zip(self.ranks, self.checkpoints, strict=True)):
                agent.step = self.step
                agent.state.tensor = torch.full((3,), float(10 * self.step + rank))
                if ranks is None or rank in ranks:
                    assert checkpoints.save()
            for checkpoints in self.checkpoints:
                assert checkpoints.wait(60)

    def holds(self, step: int) -> bool:
        return self.step == step and all(
            agent.state.tensor.tolist() == [float(10 * step + rank)] * 3 for rank, agent in enumerate(self.ranks)
        )


def folders_of(folder: Path, ranks: int, *, is_shared: bool) -> list[Path]:
    return [folder if is_shared else folder / str(rank) for rank in range(ranks)]


class TestGroup:
    @pytest.mark.parametrize("is_shared", [True, False])
    def test_a_step_counts_if_all_ranks_hold_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_shared: bool
    ) -> None:
        folders = folders_of(tmp_path, 2, is_shared=is_shared)
        group = Group(folders)
        assert group.resumed == [False, False]
        group.save(5, 10)
        for _ in range(3):
            group.save(15, ranks=[0])
            group = Group(folders)
            assert group.resumed == [True, True]
            assert group.holds(10)
        warning = "resuming from step 10, not 15: no usable checkpoint of step 15 on ranks 1"
        assert set(caplog.messages) == (set() if is_shared else {warning})
        assert not list(tmp_path.rglob(".step-*"))

    def test_parts_that_a_killed_group_has_finished_make_a_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        group = Group([tmp_path, tmp_path])
        group.save(5)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointFolder, "_complete", lambda *_: None)
            patch.setattr(CheckpointFolder, "_rotate", lambda *_: None)
            group.save(10)
        assert names(tmp_path)[1:] == ["step-000000000005-quorum-" + names(tmp_path)[1].split("-")[-1]]
        assert Group([tmp_path, tmp_path]).holds(10)

    def test_a_slow_rank_completes_the_checkpoint_that_it_has_begun(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its peer saves several times meanwhile. What no rank can complete any more is removed."""
        group = Group([tmp_path, tmp_path])
        has_begun, may_go_on, write = threading.Event(), threading.Event(), files._write_tensors

        def write_slowly(folder: Path, state: Any) -> Any:
            if folder.name.startswith("rank-1"):
                has_begun.set()
                assert may_go_on.wait(60)
            return write(folder, state)

        def save(step: int, *ranks: int) -> None:
            for rank in ranks:
                group.ranks[rank].step = step
                assert group.checkpoints[rank].save()

        monkeypatch.setattr(files, "_write_tensors", write_slowly)
        save(5, 0, 1)
        assert has_begun.wait(60)
        for step in (10, 15, 20):
            save(step, 0)
        assert group.checkpoints[0].wait(60)
        assert [path.name[:18] for path in sorted(tmp_path.glob(".step*"))] == [
            f".step-{step:012}" for step in (5, 15, 20)
        ]
        may_go_on.set()
        assert group.checkpoints[1].wait(60)
        assert steps_in(tmp_path) == [5]

    def test_a_disk_that_is_full_neither_costs_the_others_theirs_nor_fills_their_disks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folders = folders_of(tmp_path, 2, is_shared=False)
        group = Group(folders)
        group.save(5, 10)

        def write(part: Path, *arguments: Any, **options: Any) -> None:
            if options["rank"] == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            write_part(part, *arguments, **options)

        monkeypatch.setattr(checkpoint_folder, "write_part", write)
        group.save(*range(15, 60, 5))
        assert steps_in(folders[0]) == [10, 50, 55]
        assert Group(folders).holds(10)

    def test_a_first_save_while_some_of_the_ranks_catch_up(self, tmp_path: Path) -> None:
        """All ranks look at the folder together, in the first save of a script that has not resumed."""
        place = Place(2)
        place.barrier = threading.Barrier(2, timeout=2)
        ranks: list[Any] = [GroupRank(rank, 2, Weights(), place) for rank in range(2)]
        ranks[0].catches_up = True
        group = [CheckpointFolder(tmp_path, rank) for rank in ranks]
        for step in (5, 10):
            for rank in ranks:
                rank.step = step
            with ThreadPoolExecutor(2) as pool:
                saved = list(pool.map(CheckpointFolder.save, group))
            assert [path is not None for path in saved] == [step == 10, True]
            ranks[0].catches_up = False
        assert all(each.wait(60) for each in group)
        assert steps_in(tmp_path) == [10]

    def test_a_killed_first_save_is_no_reason_to_stop(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folders = folders_of(tmp_path, 2, is_shared=False)
        Group(folders).save(5, ranks=[0])
        group = Group(folders)
        assert group.resumed == [False, False]
        assert "none was ever complete, so training starts at step 0" in caplog.text
        group.save(5, 10)
        assert [len(names(folder)) for folder in folders] == [2, 2], "that of the first life is gone"
        assert Group(folders).holds(10)

    def test_a_folder_that_one_rank_cannot_use_stops_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        group = Group([tmp_path, tmp_path])
        group.save(5)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder.CheckpointFolder, "_complete", raising(OSError(errno.EIO, "bad disk")))
            own, other = Group([tmp_path, tmp_path]).errors
        assert isinstance(own, OSError)
        assert isinstance(other, AgentError)
        assert "rank 0 cannot use its folder of checkpoints" in str(other)
        (tmp_path / ".probe-12ab-1").touch()
        (tmp_path / ".removed-step-000000000001-quorum-1-ab").mkdir()
        assert Group([tmp_path, tmp_path]).holds(5)
        assert len(names(tmp_path)) == 1

    def test_a_folder_that_one_rank_cannot_list_stops_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Group([tmp_path, tmp_path]).save(5)

        def list_held(folder: CheckpointFolder, real: Any = CheckpointFolder._held) -> dict[Tag, Path]:
            if folder._rank == 1:
                raise OSError(errno.EIO, "bad disk")
            return real(folder)

        with monkeypatch.context() as patch:
            patch.setattr(CheckpointFolder, "_held", list_held)
            other, own = Group([tmp_path, tmp_path]).errors
        assert isinstance(own, OSError)
        assert isinstance(other, AgentError)
        assert "rank 1 cannot use its folder of checkpoints" in str(other)
        assert Group([tmp_path, tmp_path]).holds(5)

    def test_a_disk_that_was_lost_is_named(self, tmp_path: Path) -> None:
        folders = folders_of(tmp_path, 2, is_shared=False)
        group = Group(folders)
        group.save(5, 10)
        shutil.rmtree(folders[1])
        for error in Group(folders).errors:
            assert isinstance(error, AgentError)
            assert re.search(r"usable steps of rank 0: 5, 10; rank 1: none\)", str(error))

    def test_disks_that_were_swapped_are_named(self, tmp_path: Path) -> None:
        folders = folders_of(tmp_path, 2, is_shared=False)
        group = Group(folders)
        group.save(5, 10)
        for error in Group(folders[::-1]).errors:
            assert isinstance(error, AgentError)
            assert "start each rank on the host where it ran" in str(error)

    @pytest.mark.parametrize("is_shared", [True, False])
    def test_fewer_ranks(self, tmp_path: Path, *, is_shared: bool) -> None:
        folders = folders_of(tmp_path, 3, is_shared=is_shared)
        group = Group(folders)
        group.save(5, 10)
        assert Group(folders[:1]).holds(10)
        assert Group(folders[:2]).holds(10)

    def test_more_ranks(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        Group([tmp_path]).save(5)
        drawn = torch.get_rng_state()
        with caplog.at_level(logging.INFO):
            group = Group([tmp_path] * 3)
        assert group.resumed == [True] * 3
        assert [agent.state.tensor.tolist() for agent in group.ranks] == [[50.0] * 3] * 3
        assert "was saved by 1 ranks: rank 2 loads the part of rank 0, and keeps the random numbers" in caplog.text
        assert torch.equal(torch.get_rng_state(), drawn)
        group.save(10)
        assert Group([tmp_path] * 3).holds(10)

    @settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        is_shared=st.booleans(),
        lives=st.lists(
            st.lists(st.sampled_from(["save", "fail 0", "fail 1", "dies 0", "dies 1"]), max_size=5), max_size=4
        ),
    )
    def test_saves_failures_and_kills_in_any_order(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        monkeypatch: pytest.MonkeyPatch,
        *,
        is_shared: bool,
        lives: list[list[str]],
    ) -> None:
        """The newest step that both ranks have saved is resumed, whatever happened since."""
        folder = tmp_path_factory.mktemp("lives")
        folders = folders_of(folder, 2, is_shared=is_shared)
        common = 0
        for events in lives:
            group = Group(folders)
            assert not any(group.errors)
            assert group.step == common
            assert group.holds(common) or common == 0
            for number, event in enumerate(events, 1):
                kind, *victim = event.split()
                survivors = [1 - int(victim[0])] if victim else [0, 1]
                step = group.step + number
                if kind == "dies":
                    group.save(step, ranks=survivors)
                    (folders[1 - survivors[0]] / f".step-{step:012}-quorum-9.ab/rank-0.saving").mkdir(parents=True)
                    break

                def write(part: Path, *arguments: Any, survivors: list[int] = survivors, **options: Any) -> None:
                    if options["rank"] not in survivors:
                        raise OSError(errno.EIO, "Input/output error")
                    write_part(part, *arguments, **options)

                monkeypatch.setattr(checkpoint_folder, "write_part", write)
                group.save(step)
                monkeypatch.undo()
                if not victim:
                    common = step
        assert Group(folders).step == common
        shutil.rmtree(folder)
