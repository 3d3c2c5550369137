"""Agents that are told each of their steps, under real daemons: faults at exactly the moment that is meant."""

import itertools
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_client.errors import AgentError, ConfigurationError
from agent_client.progress.progress import TRACE_VARIABLE
from agent_client.state.train_state import TrainState
from agent_client.step.agent import Agent
from agent_client.step.rendezvous import GroupPlace
from examples.ports import free_port
from tests.agent_client.jobs import TIMES, Job
from tests.agent_client.ranks import Pending, Rank, RankError, RankServer, together
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, eventually

Step = dict[str, Any]


def step_together(*ranks: Rank, **options: Any) -> list[Step]:
    """By ranks that are in one quorum already: it waits for each of them."""
    return together(ranks, "step", **options)


def begin_together(job: Job, ranks: dict[str, Rank], *until: int) -> list[Pending]:
    """A step of each, or `steps` until so many, beginning in one quorum: the last one, without which none can form,
    asks when all others wait. `ranks` by group, or by group and number, "a/0"."""
    groups = list(dict.fromkeys(at.partition("/")[0] for at in ranks))
    pending: dict[str, Pending] = {}
    for group in groups:
        of_group = {at: rank for at, rank in ranks.items() if at.partition("/")[0] == group}
        pending |= {at: rank.begin("steps" if until else "step", *until) for at, rank in of_group.items()}
        if group != groups[-1]:
            job.wait_joined(group)
    return list(pending.values())


def meet(job: Job, ranks: dict[str, Rank], *until: int) -> list[Any]:
    return [each.result() for each in begin_together(job, ranks, *until)]


def check_equal(*logs: list[Step]) -> int:
    """The same weights wherever two committed the same step under the same quorum; how many such steps there were."""
    found: dict[tuple[int, int], str] = {}
    shared = 0
    for step in itertools.chain(*logs):
        if step["committed"]:
            key = step["step"], step["quorum_id"]
            shared += key in found
            assert found.setdefault(key, step["hash"]) == step["hash"], f"step and quorum {key}"
    return shared


def test_a_group_that_heals_counts_in_that_very_step(job: Job) -> None:
    [a] = job.groups("a")
    [*_, alone] = a.call("steps", 2)
    [b] = job.groups("b", seed=1)
    healed, with_b = meet(job, {"b": b, "a": a})
    assert with_b["participants"] == ["a", "b"]
    assert healed["participated"]
    assert healed["batches"] == with_b["batches"] == alone["batches"] + 2
    assert healed["hash"] == with_b["hash"]
    [reference] = job.elsewhere().groups("a")
    assert reference.call("steps", 3)[-1]["hash"] != with_b["hash"], "its batch is in the mean"


def test_a_forked_child_that_leaves_the_agents_block_closes_nothing(job: Job) -> None:
    """Its manager, its connections and its threads are its parent's."""
    a, b = job.groups("a", "b")
    meet(job, {"a": a, "b": b})
    before = step_together(a, b)
    assert a.begin("leave_in_child").result(PATIENCE_S) == 3
    after = step_together(a, b)
    assert [each["committed"] for each in before + after] == [True] * 4
    assert len({each["quorum_id"] for each in before + after}) == 1


def test_a_step_whose_reduction_raises_is_discarded_though_the_script_does_not_look(job: Job) -> None:
    a, b = job.groups("a", "b")
    meet(job, {"a": a, "b": b})
    for error, is_committed in together([a, b], "reduce_integers"):
        assert "can't be cast to the desired output type Long" in error
        assert not is_committed
    assert "discarded: reducing: result type Float can't be cast" in job.log("a")


def test_a_step_without_a_collective_of_the_script_s_own_commits(job: Job) -> None:
    a, b = job.groups("a", "b")
    meet(job, {"a": a, "b": b})
    for _ in range(2):
        assert [step["committed"] for step in step_together(a, b, reduces=False)] == [True, True]


def test_one_rank_s_error_discards_the_step_in_its_whole_group(job: Job) -> None:
    ranks = list(job.groups_of(2, "a", "b").values())
    assert {step["step"] for step in step_together(*ranks)} == {1}
    assert len({step["hash"] for step in step_together(*ranks)}) == 1
    others = [rank.begin("step") for rank in ranks if rank is not ranks[1]]
    assert not ranks[1].call("step", error="mine alone")["committed"]
    assert [each.result()["committed"] for each in others] == [False, True, True]
    log = step_together(*ranks)
    assert all(step["participated"] for step in log)
    assert check_equal(log[:1], log[2:3]) == 1
    assert len({step["hash"] for step in log}) == 1


# -- a peer that takes its time


def test_a_transfer_may_take_longer_than_a_collective(job: Job) -> None:
    times = {"timeout_s": 2.0, "heal_timeout_s": 60.0, "max_consecutive_discards": 5}
    [a] = job.groups("a", **times)
    a.call("steps", 2)
    [b] = job.groups("b", seed=1, **times)
    b.call("delay_fetch", 3.0)
    of_b, of_a = meet(job, {"b": b, "a": a}, 5)
    assert check_equal(of_a, of_b) >= 2


def test_a_stopped_group_costs_a_step_and_heals_when_it_goes_on(job: Job) -> None:
    a, b, c = job.groups("a", "b", "c", timeout_s=2.0)
    assert check_equal(*meet(job, {"a": a, "b": b, "c": c}, 2)) == 4
    logs = [rank.begin("steps", 6) for rank in (a, b)]
    c.call("ask")
    c.stop()
    of_a, of_b = (log.result() for log in logs)
    assert check_equal(of_a, of_b) == 4
    assert [step["committed"] for step in of_a] == [False] + 4 * [True]
    assert of_a[-1]["participants"] == ["a", "b"]
    c.resume()
    of_c, of_a, of_b = meet(job, {"c": c, "a": a, "b": b}, 8)
    assert [(step["committed"], step["participated"]) for step in of_c] == [(False, False), (True, True), (True, True)]
    assert check_equal(of_c, of_a, of_b) == 4


# -- daemons that are away


def test_a_manager_that_is_gone_ends_the_rank(job: Job) -> None:
    [a] = job.groups("a", quorum_timeout_s=1.0, timeout_s=5.0, manager_restart_timeout_s=0.5)
    assert a.call("step")["committed"]
    job.managers["a"].kill()
    with pytest.raises(RankError, match=r"lost the group's manager: .* restart the group") as raised:
        a.call("steps", 3, within_s=30.0)
    assert raised.value.kind == "AgentError"


def test_a_rank_that_raises_says_why_before_it_dies(job: Job) -> None:
    [a] = job.groups("a")
    assert a.call("step")["committed"]
    a.call("fail", "the loss is not a number")
    assert "rank 0 failed: ValueError: the loss is not a number" in job.log("a-manager")


def test_a_refusal_by_the_lighthouse_is_said_and_no_busy_loop(job: Job) -> None:
    """A group of another size is refused at once, each time: asking again must take its time, or end."""
    together(job.groups_of(2, "a").values(), "ask")
    job.start_managers("b")
    b = job.rank("b")
    tried_for_s = 2.0
    try:
        tried = b.call("count_steps", tried_for_s)
    except RankError as e:
        assert e.kind == "AgentError"
        tried = 1
    assert "replica groups of one job need the same size" in job.log("b")
    assert tried <= 10 * tried_for_s, f"{tried} steps tried and refused in {tried_for_s:g} s"


def test_a_lighthouse_that_is_away_costs_steps_but_not_the_rank(
    store: str, rank_server: RankServer, tmp_path: Path
) -> None:
    port = free_port()
    address = f"{LOCALHOST}:{port}"
    with ExitStack() as stack:
        first = stack.enter_context(Lighthouse(*TIMES, "--bind", address))
        job = Job(address, store, rank_server, tmp_path, stack)
        a, b = job.groups("a", "b", quorum_timeout_s=1.0)
        meet(job, {"a": a, "b": b}, 2)
        first.kill()
        logs = step_together(a, b)
        assert [step["committed"] for step in logs] == [False, False]
        assert f"{address} is unreachable" in job.log("a")
        stack.enter_context(Lighthouse(*TIMES, "--bind", address))
        job.wait_beats("a", "b")
        assert check_equal(*meet(job, {"a": a, "b": b}, 5)) == 3


# -- the end


def test_close_ends_everything_and_again_does_no_harm(job: Job) -> None:
    job.start_managers("a")
    a = job.rank("a")
    a.call("step")
    a.call("close")
    a.call("close")
    held = a.call("held")
    for _ in range(4):
        a.call("build", job.addresses["a"])
        assert a.call("step")["committed"]
        a.call("close")
    eventually(lambda: a.call("held") <= held, f"no more than {held} descriptors")


def test_an_agent_of_several_ranks_needs_their_group() -> None:
    with pytest.raises(ConfigurationError, match="^group: "):
        GroupPlace(0, 2)


# -- one rank in this process, which needs no manager


def lone_state() -> TrainState:
    model = torch.nn.Linear(3, 2)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_closed_agent_refuses_a_step_at_once() -> None:
    with Agent("127.0.0.1:1", state=lone_state()) as agent:
        pass
    with pytest.raises(AgentError, match="the Agent was closed"):
        agent.start_quorum()
    with pytest.raises(AgentError, match="the Agent was closed"):
        agent.all_reduce(torch.ones(3)).result()


def test_an_exception_that_cannot_be_told_closes_the_agent_too() -> None:
    class Untold(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    agent = Agent("127.0.0.1:1", state=lone_state())
    with pytest.raises(RuntimeError, match="no text"), agent:
        raise Untold
    assert agent.internals.manager.watch.is_closing


def test_an_option_that_is_refused_late_leaves_no_manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script may catch the error and try another option: two managers of the same name would not do."""
    ended: list[str] = []
    process: Any = SimpleNamespace(stop=lambda: ended.append("manager"), is_alive=True)
    group: Any = SimpleNamespace(abort=lambda: ended.append("group"))
    place = GroupPlace(0, 2, group, process)
    monkeypatch.setattr("agent_client.step.agent.rendezvous", lambda *_: ("127.0.0.1:1", place))
    monkeypatch.setenv("LIGHTHOUSE_MANAGER_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=TRACE_VARIABLE):
        Agent.from_env(state=lone_state())
    assert ended == ["group", "manager"]
