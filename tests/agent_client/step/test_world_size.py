"""What counts in a step: every contribution once, whoever is there; and the same losses with kills as without."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_client import Agent, AgentConfig, ConfigurationError, StepSampler, TrainState
from agent_client.step.rendezvous import GroupPlace
from agent_client.step.rules.machine import StepMachine
from agent_client.step.rules.world_size import (
    MIN_GAIN,
    NO_SHARE,
    Share,
    WorldSize,
    WorldSizeMode,
    decide_shares,
)
from agent_client.step.rules.world_size import shares as shares_of
from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum
from manager.group.requests import assign
from tests.agent_client import batch_training
from tests.agent_client.assignments import assignment
from tests.agent_client.clusters import all_events, check_all
from tests.agent_client.slow_actor import SlowBatchActor
from tests.agent_client.training_jobs import Group, MakeJob, TrainingJob
from tests.processes import PATIENCE_S, eventually

DYNAMIC, FIXED, CONSTANT = WorldSizeMode

modes = st.sampled_from(list(WorldSizeMode))
sizes = st.integers(1, 12)


def assignments(contributors: int, healing: int) -> list[Assignment]:
    """Of all participants: first those that contribute, then those that heal."""
    members = contributors + healing
    told = {"contributors": contributors, "healing": tuple(range(contributors, members))}
    behind = {"max_rank": None, "place": None, "heal_from_rank": 0}
    return [assignment(place, members, **told, **(behind if place >= contributors else {})) for place in range(members)]


def shares(mode: WorldSizeMode, size: int, members: list[Assignment]) -> list[Share]:
    return [WorldSize(mode, size).share(member) for member in members]


def counted(found: list[Share]) -> list[int]:
    return sorted(number for share in found if share.counts for number in share.microbatches)


@given(modes, sizes, st.integers(1, 12), st.integers(0, 3))
def test_every_microbatch_counts_once_and_all_divide_by_the_same(
    mode: WorldSizeMode, size: int, contributors: int, healing: int
) -> None:
    found = shares(mode, size, assignments(contributors, healing))
    [divisor] = {share.divisor for share in found}
    assert counted(found) == list(range(divisor))
    assert divisor == {DYNAMIC: contributors, FIXED: min(size, contributors), CONSTANT: size}[mode]
    assert all(share.microbatches and max(share.microbatches) < divisor for share in found), "all have work"
    assert not any(share.counts for share in found[contributors:]), "who heals does not count"


@given(sizes, st.integers(1, 12))
def test_microbatches_are_dealt_out_evenly(size: int, contributors: int) -> None:
    found = shares(CONSTANT, size, assignments(contributors, 0))
    loads = [len(share.microbatches) if share.counts else 0 for share in found]
    assert max(loads) - min(loads) <= 1
    assert all(len(share.microbatches) == 1 for share in found if not share.counts), "a spare does no more than it must"


times = st.lists(st.integers(1, 10_000_000), min_size=1, max_size=6)


def finish_us(counts: tuple[int, ...], times_us: list[int]) -> int:
    return max(count * time_us for count, time_us in zip(counts, times_us, strict=True))


def partitions(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [(n, *rest) for n in range(1, total - parts + 2) for rest in partitions(total - n, parts - 1)]


class TestShares:
    @given(times, st.integers(0, 60))
    def test_all_microbatches_are_given_and_each_group_has_one(self, times_us: list[int], more: int) -> None:
        counts = shares_of(times_us, len(times_us) + more)
        assert sum(counts) == len(times_us) + more
        assert min(counts) >= 1

    @given(times.filter(lambda times: len(times) <= 4), st.integers(0, 6))
    def test_no_other_division_ends_earlier(self, times_us: list[int], more: int) -> None:
        total = len(times_us) + more
        best = min(finish_us(counts, times_us) for counts in partitions(total, len(times_us)))
        assert finish_us(shares_of(times_us, total), times_us) == best

    @given(times, st.integers(0, 60), st.randoms())
    def test_what_a_group_gets_does_not_depend_on_its_place(self, times_us: list[int], more: int, random: Any) -> None:
        total, order = len(times_us) + more, list(range(len(times_us)))
        random.shuffle(order)
        moved = shares_of([times_us[place] for place in order], total)
        before = zip(times_us, shares_of(times_us, total), strict=True)
        assert sorted(before) == sorted(zip([times_us[place] for place in order], moved, strict=True))

    @given(times, st.integers(0, 60))
    def test_a_faster_group_gets_no_less(self, times_us: list[int], more: int) -> None:
        counts = shares_of(times_us, len(times_us) + more)
        for time_us, count in zip(times_us, counts, strict=True):
            for other_us, other in zip(times_us, counts, strict=True):
                assert count + 1 >= other if time_us == other_us else (time_us < other_us) <= (count >= other)

    @given(times, st.integers(0, 60))
    def test_one_microbatch_more_takes_none_away(self, times_us: list[int], more: int) -> None:
        total = len(times_us) + more
        pairs = zip(shares_of(times_us, total), shares_of(times_us, total + 1), strict=True)
        assert all(before <= after for before, after in pairs)

    def test_noise_changes_no_share(self) -> None:
        before = decide_shares((), [100, 100, 100, 300], 20)
        assert before == (6, 6, 6, 2)
        for noise in range(-4, 5):
            assert decide_shares(before, [100 - noise, 100, 100 + noise, 300 + noise], 20) == before
        assert shares_of([100, 98, 100, 100], 13) == (3, 4, 3, 3)
        assert decide_shares((4, 3, 3, 3), [100, 98, 100, 100], 13) == (4, 3, 3, 3)

    def test_shares_change_when_that_saves_time(self) -> None:
        assert decide_shares((6, 6, 6, 2), [100, 100, 100, 100], 20) == (5, 5, 5, 5)
        assert MIN_GAIN < 1 - 5 / 6

    def test_a_group_without_a_measurement_counts_as_the_median(self) -> None:
        assert decide_shares((), [0, 100, 100, 300], 20) == (6, 6, 6, 2)
        assert decide_shares((), [0, 0, 0, 0], 20) == (5, 5, 5, 5)

    def test_other_contributors_need_new_shares(self) -> None:
        assert decide_shares((6, 6, 6, 2), [100, 100, 100], 20) == (7, 7, 6)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 2))
def test_shares_give_each_microbatch_to_one_contributor(counts: list[int], healing: int) -> None:
    size = WorldSize(CONSTANT, sum(counts))
    found = [size.share(member, counts) for member in assignments(len(counts), healing)]
    assert counted(found) == list(range(sum(counts)))
    assert [share.weight for share in found] == [*counts, *[0] * healing]


@given(sizes, st.integers(1, 12), st.lists(st.integers(1, 3), max_size=12))
def test_shares_that_do_not_fit_are_not_used(size: int, contributors: int, counts: list[int]) -> None:
    if (len(counts), sum(counts)) != (contributors, size):
        for member in assignments(contributors, 0):
            assert WorldSize(CONSTANT, size).share(member, counts) == WorldSize(CONSTANT, size).share(member)


def test_only_a_group_of_one_rank_with_a_constant_batch_shares_by_speed(train_state: TrainState) -> None:
    with pytest.raises(ConfigurationError, match="^share_by_speed: not with dynamic"):
        AgentConfig(share_by_speed=True)
    config = AgentConfig(share_by_speed=True, world_size_mode="constant_batch", world_size=4)
    place = GroupPlace(0, 2, cast("Any", object()))
    with pytest.raises(ConfigurationError, match="^share_by_speed: this group has 2 ranks"):
        Agent("127.0.0.1:1", state=train_state, config=config, place=place)


@given(modes, sizes, st.integers(1, 5), st.integers(0, 4))
def test_at_step_0_only_the_one_from_whom_all_start_counts(
    mode: WorldSizeMode, size: int, members: int, group_rank: int
) -> None:
    """All are at max_step; where somebody sends no tags, each group rank starts from another group."""
    participants = tuple(Participant(str(place), tag_quorum_id=None) for place in range(members))
    found = [assign(Quorum(1, participants), str(place), group_rank, init_sync=True) for place in range(members)]
    divided = shares(mode, size, [each for each in found if each is not None])
    assert [place for place, share in enumerate(divided) if share.counts] == [group_rank % members]
    assert counted(divided) == list(range(divided[0].divisor))


def test_without_a_quorum_nothing_counts() -> None:
    assert Share((0,), 1, counts=False) == NO_SHARE == WorldSize(CONSTANT, 4).share(None)


@pytest.mark.parametrize(("place", "contributes"), [(0, True), (1, True), (2, False)])
def test_a_spare_is_in_the_step_and_adds_nothing(place: int, contributes: bool) -> None:
    machine = StepMachine(step=5, world_size=WorldSize(FIXED, 2))
    machine.ask()
    assert not machine.contributes
    machine.accept_assignment(assignments(3, 0)[place])
    machine.record_reduction()
    assert machine.contributes is contributes
    assert machine.vote()
    machine.record_decision(commit=True)
    assert (machine.step, machine.batches_committed) == (6, 2)


@pytest.fixture
def train_state() -> TrainState:
    model = torch.nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_where_a_rank_may_have_several_microbatches_none_is_given_alone(train_state: TrainState) -> None:
    """It would go well until the first group is lost."""
    config = AgentConfig(world_size_mode="constant_batch", world_size=3)
    with Agent("127.0.0.1:1", state=train_state, config=config) as agent:
        with pytest.raises(ConfigurationError, match="microbatches"):
            next(iter(StepSampler(10, 2, agent)))


@pytest.mark.parametrize("mode", ["constant_batch", "fixed_with_spares"])
def test_what_another_group_is_to_do_next_is_not_reduced_again(train_state: TrainState, mode: Any) -> None:
    """Three groups and a spare that computes what the first does: without the second their places move, and the first
    microbatch would count twice."""
    with Agent("127.0.0.1:1", state=train_state, config=AgentConfig(world_size_mode=mode, world_size=3)) as agent:
        with pytest.raises(ConfigurationError, match=f"^salvage: in {mode} mode .* leave salvage out"):
            agent.internals.salvage_by(lambda: None, lambda: 0)


@pytest.mark.parametrize(("mode", "size"), [("constant_batch", 0), ("fixed_with_spares", -1), ("constant", 3)])
def test_an_agent_refuses_a_mode_without_its_size(mode: Any, size: int) -> None:
    with pytest.raises(ConfigurationError, match="^world_size(_mode)?: "):
        AgentConfig(world_size_mode=mode, world_size=size)


# -- real training

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
PACE_S = 0.01


def plain_run(microbatches: int) -> list[tuple[list[float], float]]:
    """(the samples' shares, the mean loss) of each step by torch alone, from the weights of the first group."""
    torch.manual_seed(0)
    model = batch_training.make_model()
    sgd = batch_training.sgd_of(model)
    inputs, targets = batch_training.data()
    sampler = StepSampler(batch_training.SAMPLES, batch_training.BATCH_SIZE, None)  # type: ignore[arg-type]
    found: list[tuple[list[float], float]] = []
    for step in range(batch_training.STEPS):
        batches = [sampler.batch(step * microbatches + place) for place in range(microbatches)]
        sgd.zero_grad()
        loss = torch.stack([batch_training.loss_of(model, inputs[batch], targets[batch]) for batch in batches]).mean()
        loss.backward()
        sgd.step()
        counts = torch.cat(batches).bincount(minlength=batch_training.SAMPLES).double()
        found.append(((counts / len(batches)).tolist(), loss.item()))
    return found


class Run:
    """Groups that train to the end, whatever happens to them."""

    def __init__(self, job: TrainingJob, names: str = "abc") -> None:
        self.job = job
        self.groups = job.all_groups(*names)
        job.start(*self.groups, pace_s=PACE_S)

    def wait_step(self, step: int, *groups: Group) -> None:
        def newest() -> int:
            return max((event["step"] for group in groups for event in self.job.committed(group)), default=0)

        eventually(lambda: newest() >= step, f"step {step}", 2 * PATIENCE_S)

    def kill_at(self, step: int, victim: Group) -> None:
        """And start it again, until it counts."""
        others = [group for group in self.groups if group is not victim]
        self.wait_step(step, *others)
        victim.kill()
        self.job.wait_steps(*others, more=3, participants=len(others))
        self.job.start(victim, pace_s=PACE_S)
        self.job.wait_steps(*self.groups, more=2, participants=len(self.groups))

    def check(self, expected: list[tuple[list[float], float]]) -> set[int]:
        """Every step that any rank committed was as expected. The sizes of the quorums."""
        self.wait_step(batch_training.STEPS, *self.groups)
        check_all(self.job.folder)
        events = [event for events in all_events(self.job.folder) for event in events]
        assert {event["step"] for event in events} == set(range(1, batch_training.STEPS + 1))
        for event in events:
            shares, loss = expected[event["step"] - 1]
            assert event["shares"] == pytest.approx(shares, abs=1e-12), f"other samples in step {event['step']}"
            assert abs(event["loss"] - loss) <= 1e-9, f"another loss in step {event['step']}"
        return {event["participants"] for event in events}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "size", "ranks"),
    [(CONSTANT, 6, 1), (CONSTANT, 4, 2), (FIXED, 2, 1)],
)
def test_the_trajectory_does_not_bend_when_groups_die(
    make_job: MakeJob, tmp_path: Path, mode: WorldSizeMode, size: int, ranks: int
) -> None:
    """200 steps with two kills, and 200 without: the same samples in each committed step, and the same losses."""
    expected = plain_run(size * ranks)

    def run(name: str) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        options = {"world_size_mode": mode.value, "world_size": size}
        return Run(make_job(batch_training.BatchActor, ranks=ranks, folder=folder, **options))

    calm, rough = run("calm"), run("rough")
    rough.kill_at(30, rough.groups[0])
    rough.kill_at(90, rough.groups[2])
    assert rough.check(expected) == {2, 3}
    assert calm.check(expected) == {3}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_shares_by_speed_each_sample_counts_once_while_the_slow_group_dies_and_returns(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Four groups, of which b takes three times as long for a microbatch."""
    options = {"world_size_mode": "constant_batch", "world_size": 20, "share_by_speed": True}
    run = Run(make_job(SlowBatchActor, ranks=1, folder=tmp_path, **options), "abcd")
    run.kill_at(60, run.groups[1])
    assert run.check(plain_run(20)) == {3, 4}
    shares = re.findall(r"microbatches of a step, by group: ([\d, ]+)", run.job.log_of(run.groups[0]))
    assert any(int(each.split(", ")[1]) < 5 for each in shares if each.count(",") == 3), shares
