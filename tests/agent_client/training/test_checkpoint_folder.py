"""Which checkpoint a rank goes on from; and a job of which every process has died goes on, bit by bit."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_client.agent.agent import Agent
from agent_client.state.files import write_state
from agent_client.state.snapshot import StateMismatch
from agent_client.state.train_state import TrainState
from agent_client.training.checkpoint_folder import CheckpointFolder, Tag, newest_common
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank, RankServer, together
from tests.processes import Lighthouse

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
        path = CheckpointFolder(tmp_path, at(agent, 12, 77)).save()
        assert path.name == "step-000000000012-quorum-77-rank-0.state"
        with make_agent(2) as other:
            assert weights(other) != weights(agent)
            assert CheckpointFolder(tmp_path, other).resume()
            assert weights(other) == weights(agent)
            assert other.state_dict() == {"step": 12, "tag_quorum_id": 77, "batches_committed": 24}
            assert (other.current_step, other.batches_committed) == (12, 24)

    def test_without_any(self, agent: Agent, tmp_path: Path) -> None:
        before = weights(agent)
        assert not CheckpointFolder(tmp_path / "new", agent).resume()
        assert (weights(agent), agent.current_step) == (before, 0)

    def test_the_newest_are_kept(self, agent: Agent, tmp_path: Path) -> None:
        (tmp_path / "step-000000000001-quorum-1-rank-1.state").write_text("of another rank")
        (tmp_path / "notes.txt").write_text("not ours")
        checkpoints = CheckpointFolder(tmp_path, agent, keep=3)
        for step in range(1, 7):
            at(agent, step, 100 + step)
            checkpoints.save()
        own = [f"step-{step:012}-quorum-{100 + step}-rank-0.state" for step in (4, 5, 6)]
        others = ["notes.txt", "step-000000000001-quorum-1-rank-1.state"]
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(own + others)

    def test_one_written_after_a_step_back_is_kept_too(self, agent: Agent, tmp_path: Path) -> None:
        """A group that resumed and healed may write a lower step than the files that it left."""
        checkpoints = CheckpointFolder(tmp_path, agent)
        for step in (8, 9, 3):
            path = (at(agent, step, step), checkpoints.save())[1]
        assert path.exists()

    def test_a_damaged_one_is_passed_over_by_name(
        self, agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        checkpoints = CheckpointFolder(tmp_path, agent)
        for step in (1, 2):
            path = (at(agent, step, step), checkpoints.save())[1]
        path.write_bytes(path.read_bytes()[:-3])
        with make_agent(2) as other, caplog.at_level(logging.WARNING):
            assert CheckpointFolder(tmp_path, other).resume()
            assert other.current_step == 1
        assert f"passed over: {path} cannot be used" in caplog.text

    def test_one_under_a_wrong_name_is_passed_over(self, agent: Agent, tmp_path: Path) -> None:
        path = CheckpointFolder(tmp_path, at(agent, 1, 1)).save()
        path.rename(tmp_path / "step-000000000009-quorum-1-rank-0.state")
        write_state(tmp_path / "step-000000000008-quorum-1-rank-0.state", [1, 2, 3])
        with make_agent(2) as other:
            assert not CheckpointFolder(tmp_path, other).resume()

    def test_one_of_another_model_ends_it_by_name(self, agent: Agent, tmp_path: Path) -> None:
        path = CheckpointFolder(tmp_path, at(agent, 1, 1)).save()
        with make_agent(2, features=4) as other:
            before = weights(other)
            with pytest.raises(StateMismatch, match=rf"{path}.*\n.*\['weight'\]: shape \(2, 4\) here"):
                CheckpointFolder(tmp_path, other).resume()
            assert (weights(other), other.current_step) == (before, 0)

    def test_fewer_than_two_are_refused(self, agent: Agent, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="at least two"):
            CheckpointFolder(tmp_path, agent, keep=1)


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
    [last_of_rank_1] = (tmp_path / "files-b").glob("step-000000000006-*-rank-1.state")
    last_of_rank_1.unlink()  # it was killed before it had written that one

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
