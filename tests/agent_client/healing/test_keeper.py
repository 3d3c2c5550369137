"""What a rank keeps in its supervisor's memory: only complete states of its own come back, whatever is cut off."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_client.healing import keeper as keeper_module
from agent_client.healing.keeper import Keeper
from agent_client.state import train_state
from agent_client.state.random_state import restore_random
from agent_client.state.train_state import TrainState
from agent_client.step.environment import owner_name
from lighthouse_protocol.messages.membership import Tag
from lighthouse_runtime.process.kept_memory import (
    HEADER_BYTES,
    BufferHeader,
    buffer_path,
    make_buffer,
    read_header,
    write_header,
)

OWNER = owner_name("job", "a", "f00d", 0, 1)
START = Tag(0, 0)
QUORUM = 7


@pytest.fixture(autouse=True, scope="module")
def _no_search_for_schedulers() -> Iterator[None]:
    """It looks at every object of this process, for each rank that starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_state, "live_objects", lambda *kinds: [])
        yield


class Rank:
    """A rank whose process dies and starts again, while its buffers live on."""

    def __init__(self, rank: int = 0, ranks: int = 1, every: int = 1) -> None:
        self.rank, self.ranks, self.every = rank, ranks, every
        self.buffers = [make_buffer("test"), make_buffer("test")]
        self.start()

    def start(self, owner: str = OWNER, features: int = 3) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(features, 2)
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = TrainState(self.model, self.adam)
        paths = tuple(map(buffer_path, self.buffers))
        self.keeper = Keeper(self.state, self.every, paths, owner)

    def train(self, step: int) -> None:
        """Commit `step`, and begin to keep it."""
        self.model(torch.full((1, self.model.in_features), float(step))).sum().backward()
        self.adam.step()
        self.adam.zero_grad()
        self.state.begin_step()
        self.keeper.keep({"step": step, "tag_quorum_id": QUORUM, "batches_committed": 2 * step})

    def weights(self) -> list[float]:
        return self.model.weight.detach().flatten().tolist()

    def restore(self, above: Tag = START, total: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
        return self.keeper.restore(self.rank, self.ranks, above, total)

    def restart(self, owner: str = OWNER) -> int | None:
        """The step that it restores in its next process."""
        self.start(owner)
        return step_of(self.restore())

    @property
    def headers(self) -> list[BufferHeader]:
        return [header for buffer in self.buffers if (header := read_header(buffer)) is not None]

    def buffer_of(self, step: int) -> int:
        return next(buffer for buffer in self.buffers if (header := read_header(buffer)) and header.step == step)

    def close(self) -> None:
        self.keeper.close()
        for buffer in self.buffers:
            os.close(buffer)


@pytest.fixture
def rank() -> Iterator[Rank]:
    it = Rank()
    yield it
    it.close()


def trained(rank: Rank, steps: int) -> dict[int, list[float]]:
    """The weights after each step, all of which were kept."""
    found: dict[int, list[float]] = {}
    for step in range(1, steps + 1):
        rank.train(step)
        rank.keeper.finish()
        found[step] = rank.weights()
    return found


def step_of(kept: Any) -> int | None:
    return None if kept is None else kept["agent"]["step"]


def weights_of(kept: Any) -> list[float]:
    return kept["train"]["model"]["weight"].flatten().tolist()


def test_the_newest_state_comes_back_with_its_position_and_its_random_numbers(rank: Rank) -> None:
    weights = trained(rank, 5)
    rank.train(6)
    drawn = torch.rand(3)
    rank.keeper.finish()
    rank.start()
    kept = rank.restore()
    assert kept["agent"] == {"step": 6, "tag_quorum_id": QUORUM, "batches_committed": 12}
    assert weights_of(kept) not in weights.values()
    rank.state.load_state_dict(kept["train"])
    restore_random(kept["random"])
    assert torch.equal(torch.rand(3), drawn)
    assert rank.adam.state[rank.model.weight]["step"] == 6


def test_a_state_that_is_not_newer_is_left_alone(rank: Rank) -> None:
    trained(rank, 5)
    rank.start()
    assert rank.restore(above=Tag(5, 3)) is None
    rank.start()
    assert step_of(rank.restore(above=Tag(4, 9))) == 5


def test_only_every_kth_step_is_kept() -> None:
    rank = Rank(every=3)
    trained(rank, 8)
    assert rank.restart() == 6
    rank.close()


def test_a_state_of_a_later_quorum_is_newer_even_at_a_lower_step(rank: Rank) -> None:
    """Its group had to heal to a lower step, so the higher one is of a past that nobody continues."""
    rank.train(9)
    rank.keeper.keep({"step": 4, "tag_quorum_id": QUORUM + 1, "batches_committed": 0})
    rank.keeper.finish()
    assert rank.restart() == 4


def test_what_was_not_restored_is_overwritten_first(rank: Rank) -> None:
    trained(rank, 5)
    damage(rank.buffer_of(5), HEADER_BYTES + 300)
    assert rank.restart() == 4
    rank.train(5)
    rank.keeper.finish()
    assert sorted(header.step for header in rank.headers) == [4, 5]


def damage(buffer: int, at: int) -> None:
    [byte] = os.pread(buffer, 1, at)
    os.pwrite(buffer, bytes([byte ^ 1]), at)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.integers(1, 4),
    which=st.sets(st.integers(0, 1)),
    kind=st.sampled_from(["cut", "flip", "zero", "other"]),
    place=st.floats(0, 1),
    length=st.integers(1, 3000),
)
# One buffer has the header of the other one.
@example(steps=2, which={0}, kind="other", place=0.0, length=3000)
@example(steps=2, which={1}, kind="other", place=0.0, length=3000)
def test_a_buffer_that_is_cut_off_or_changed_anywhere_is_never_used(
    steps: int, which: set[int], kind: str, place: float, length: int
) -> None:
    rank = Rank()
    weights = trained(rank, steps)
    intact: list[int] = []
    contents = [os.pread(buffer, 1 << 20, 0) for buffer in rank.buffers]
    for index, buffer in enumerate(rank.buffers):
        header, before = read_header(buffer), contents[index]
        if header is None:
            continue
        end = HEADER_BYTES + header.length
        at = min(int(place * end), end - 1)
        if index in which and kind == "cut":
            os.ftruncate(buffer, at)
        elif index in which and kind == "flip":
            damage(buffer, at)
        elif index in which and kind == "zero":
            os.pwrite(buffer, bytes(min(length, end - at)), at)
        elif index in which:  # half of it is of the other buffer's step
            os.pwrite(buffer, contents[1 - index][at : min(end, at + length)], at)
        used = len(before.rstrip(b"\0")) if kind != "cut" else end
        after = os.pread(buffer, end, 0)
        if after[:used] == before[:end][:used] or not _matters(before, after, end):
            intact.append(header.step)
    rank.start()
    kept = rank.restore()
    assert step_of(kept) == max(intact, default=None)
    if kept is not None:
        assert weights_of(kept) == weights[step_of(kept) or 0]
    rank.close()


def _matters(before: bytes, after: bytes, end: int) -> bool:
    """Whether anything but the padding behind the header's text has changed."""
    text = before[:HEADER_BYTES].rstrip(b"\0")
    return before[: len(text)] != after[: len(text)] or before[HEADER_BYTES:end] != after[HEADER_BYTES:end]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.integers(1, 3), share=st.floats(0, 1))
def test_a_kill_anywhere_in_a_write_leaves_the_state_before(steps: int, share: float) -> None:
    """All writes to the buffers are recorded, and a beginning of those of the last step is repeated on a copy."""
    rank, writes, pwrite = Rank(), list[tuple[int, bytes, int]](), os.pwrite

    def recording(descriptor: int, content: bytes, at: int) -> int:
        writes.append((descriptor, bytes(content), at))
        return pwrite(descriptor, content, at)

    weights = trained(rank, steps)
    before = [os.pread(buffer, 1 << 20, 0) for buffer in rank.buffers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", recording)
        rank.train(steps + 1)
        rank.keeper.finish()
    weights[steps + 1] = rank.weights()
    done = int(share * len(writes))
    for buffer, content in zip(rank.buffers, before, strict=True):
        os.ftruncate(buffer, len(content))
        os.pwrite(buffer, content, 0)
    own = {os.stat(f"/proc/self/fd/{buffer}").st_ino: buffer for buffer in rank.buffers}
    places = {each: own[os.fstat(each).st_ino] for each, _, _ in writes}
    for descriptor, content, at in writes[:done]:
        os.pwrite(places[descriptor], content, at)
    rank.start()
    kept = rank.restore()
    assert step_of(kept) == (steps + 1 if done == len(writes) else steps)
    assert weights_of(kept) == weights[step_of(kept) or 0]
    rank.close()


@pytest.mark.parametrize(
    "owner",
    [
        owner_name("job", "a", "beef", 0, 1),
        owner_name("job", "a", "f00d", 1, 1),
        owner_name("job", "a", "f00d", 0, 2),
        owner_name("job", "b", "f00d", 0, 1),
        owner_name("other", "a", "f00d", 0, 1),
    ],
    ids=["incarnation", "rank", "world size", "group", "job"],
)
def test_what_another_rank_or_start_has_written_is_not_used(rank: Rank, owner: str) -> None:
    trained(rank, 3)
    rank.start(owner)
    assert rank.restore() is None
    rank.train(1)
    rank.keeper.finish()
    assert rank.restart(owner) == 1


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"digest": "0" * 16}, "step 3 that was kept in memory cannot be used: its checksum is wrong"),
        ({"step": 30}, f"it is of step 3 of quorum {QUORUM}"),
    ],
    ids=["checksum", "tag"],
)
def test_a_header_that_lies_is_found(
    rank: Rank, caplog: pytest.LogCaptureFixture, lie: dict[str, Any], words: str
) -> None:
    trained(rank, 3)
    [header] = [header for header in rank.headers if header.step == 3]
    write_header(rank.buffer_of(3), replace(header, **lie))
    assert rank.restart() == 2
    assert words in caplog.text


def test_the_state_of_another_model_is_not_used(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    trained(rank, 3)
    rank.start(features=4)
    assert rank.restore() is None
    assert "does not match the local one" in caplog.text


def test_without_memory_nothing_is_kept_and_the_buffer_and_one_warning_say_so(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(keeper_module, "has_room", lambda size: bool(asked.append(size)))
    trained(rank, 3)
    assert asked[0] > 2 * HEADER_BYTES
    assert caplog.text.count("is not kept in memory: two copies need 0 MiB more") == 1
    assert "0 MiB more for each rank of this host, and twice that must be available, not" in caplog.text
    assert rank.headers
    assert all("two copies need" in header.problem for header in rank.headers)
    assert rank.restart() is None
    monkeypatch.undo()
    trained(rank, 2)
    assert rank.restart() == 2


def test_a_buffer_that_cannot_grow_costs_no_training(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    trained(rank, 2)
    assert "No space left on device" in rank.headers[0].problem


def test_a_state_that_changed_while_it_was_copied_is_dropped(rank: Rank) -> None:
    trained(rank, 2)
    rank.train(3)
    rank.state.stands_still = False  # found at the vote of this step
    rank.keeper.finish()
    assert rank.restart() == 2


def test_a_copy_that_fails_or_is_dropped_does_not_cost_the_state_before(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(rank, 2)
    with monkeypatch.context() as patch:
        patch.setattr(keeper_module, "encode", lambda state: 1 / 0)
        for step in (3, 4):
            rank.train(step)
            rank.keeper.finish()
    rank.train(5)
    rank.state.stands_still = False
    rank.keeper.finish()
    assert rank.restart() == 2


def test_nothing_is_erased_before_there_is_room(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(rank, 2)
    found: list[list[int]] = []

    def has_room(size: int) -> bool:
        found.append(sorted(header.step for header in rank.headers))
        return False

    monkeypatch.setattr(keeper_module, "has_room", has_room)
    os.ftruncate(rank.buffers[0], HEADER_BYTES + rank.headers[0].length)
    rank.model.register_buffer("more", torch.zeros(100_000))
    rank.train(3)
    rank.keeper.finish()
    assert found == [[1, 2]]


def test_a_copy_that_hangs_is_given_up_and_never_completed(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained(rank, 2)
    may_go_on, threads = threading.Event(), list[threading.Thread]()
    write_all = keeper_module._write_all

    def hang(*arguments: Any) -> None:
        threads.append(threading.current_thread())
        assert may_go_on.wait(60)
        write_all(*arguments)

    monkeypatch.setattr(keeper_module, "_write_all", hang)
    rank.train(3)
    rank.keeper.finish(0.1)
    assert "was not complete after 0.1 s; this rank keeps no more states" in caplog.text
    rank.train(4)
    rank.keeper.close()
    may_go_on.set()
    threads[0].join()
    assert len(set(threads)) == 1
    assert [header.step for header in rank.headers if header.length] == [2]
    assert any("not complete" in header.problem for header in rank.headers)
    assert rank.restart() == 2


def test_after_a_divergence_nothing_is_left_even_if_a_copy_hangs(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(rank, 2)
    may_go_on = threading.Event()
    monkeypatch.setattr(keeper_module, "_write_all", lambda *arguments: may_go_on.wait(60))
    rank.train(3)
    rank.keeper.finish(0.1)
    rank.keeper.clear()
    may_go_on.set()
    assert rank.restart() is None


def test_a_problem_that_does_not_fit_into_the_header_ends_no_copies(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(state: Any) -> Any:
        raise RuntimeError(text)

    with monkeypatch.context() as patch:
        patch.setattr(keeper_module, "encode", fail)
        text = "\u00fc" * 1000
        trained(rank, 1)
        [header] = rank.headers
        assert text[:900] in header.problem
        text = "\U0001f600" * 1000
        rank.keeper._problem = ""
        rank.keeper._owner = "o" * 200
        rank.train(2)
        rank.keeper.finish()
    assert "does not fit into 4096" in caplog.text
    rank.start()
    trained(rank, 3)
    assert rank.restart() == 3


def test_after_a_divergence_the_healed_state_of_the_same_step_is_kept(rank: Rank) -> None:
    trained(rank, 3)
    rank.keeper.clear()
    with torch.no_grad():
        rank.model.weight.zero_()
    rank.keeper.keep({"step": 3, "tag_quorum_id": QUORUM, "batches_committed": 6})
    rank.keeper.finish()
    rank.start()
    assert weights_of(rank.restore()) == [0.0] * 6


def test_memory_that_cannot_be_opened_keeps_nothing(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    it = Keeper(rank.state, 1, ("/proc/self/fd/9999",), OWNER)
    assert "cannot use the memory of this rank's supervisor" in caplog.text
    it.keep({"step": 1, "tag_quorum_id": 1, "batches_committed": 1})
    assert it.restore(0, 1, START, torch.clone) is None


def test_if_one_buffer_cannot_be_opened_the_other_is_closed(rank: Rank) -> None:
    before = os.listdir("/proc/self/fd")
    it = Keeper(rank.state, 1, (buffer_path(rank.buffers[0]), "/proc/self/fd/9999"), OWNER)
    assert os.listdir("/proc/self/fd") == before
    assert it.restore(0, 1, START, torch.clone) is None


# -- groups of several ranks


def restored(ranks: Sequence[Rank]) -> list[int | None]:
    """The steps that the ranks of a group restore after all of them were killed."""
    barrier, total = threading.Barrier(len(ranks), timeout=30), list[torch.Tensor]()

    def sum_over_group(tensor: torch.Tensor) -> torch.Tensor:
        if barrier.wait() == 0:
            total.clear()
        barrier.wait()
        total.append(tensor)
        barrier.wait()
        return torch.stack(list(total)).sum(0)

    for rank in ranks:
        rank.start(owner_name("job", "a", "f00d", rank.rank, rank.ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [step_of(kept) for kept in pool.map(lambda rank: rank.restore(total=sum_over_group), ranks)]


@settings(max_examples=15, deadline=None)
@given(
    steps=st.integers(1, 5),
    ahead=st.lists(st.sampled_from(["before", "writing", "written"]), min_size=2, max_size=3),
    is_voted=st.booleans(),
)
def test_ranks_that_die_at_different_moments_restore_one_step_and_lose_one_at_most(
    steps: int, ahead: list[str], is_voted: bool
) -> None:
    """All have voted on `steps`. In the next one, each has not begun to write, or is writing, or has written. If some
    have voted on that one, all have written it, and those write the one after."""
    ranks = [Rank(number, len(ahead)) for number in range(len(ahead))]
    for rank in ranks:
        rank.start(owner_name("job", "a", "f00d", rank.rank, rank.ranks))
        trained(rank, steps + is_voted)
    last = steps + is_voted
    for rank, where in zip(ranks, ahead, strict=True):
        if where == "before":
            continue
        rank.train(last + 1)
        rank.keeper.finish()
        if where == "writing":
            write_header(rank.buffer_of(last + 1), None)
    expected = last + 1 if set(ahead) == {"written"} else last
    assert restored(ranks) == [expected] * len(ranks)
    for rank in ranks:
        rank.close()


def test_a_damaged_state_of_one_rank_is_used_by_none() -> None:
    ranks = [Rank(0, 2), Rank(1, 2)]
    for rank in ranks:
        rank.start(owner_name("job", "a", "f00d", rank.rank, 2))
        trained(rank, 3)
    damage(ranks[1].buffer_of(3), HEADER_BYTES + 300)
    assert restored(ranks) == [2, 2]
    for rank in ranks:
        rank.close()


def test_a_rank_that_has_nothing_makes_the_group_heal() -> None:
    ranks = [Rank(0, 2), Rank(1, 2)]
    ranks[0].start(owner_name("job", "a", "f00d", 0, 2))
    trained(ranks[0], 3)
    logging.disable(logging.NOTSET)
    assert restored(ranks) == [None, None]
    for rank in ranks:
        rank.close()
