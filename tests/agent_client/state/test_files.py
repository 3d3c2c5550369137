"""A rank's part of a checkpoint holds a whole state or is refused by name, and any number of ranks can read it."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from agent_client.state import files
from agent_client.state.files import freeze, read_parts, read_state, write_metadata, write_part
from agent_client.state.shards import Shards
from agent_client.state.tree import CorruptState
from tests.agent_client.state.trees import same, trees

STATE = {"train": {"model": {"w": torch.arange(6.0).reshape(2, 3)}}, "step": 12}


def no_shards() -> Shards:
    raise AssertionError("nothing is sharded")


def write(folder: Path, state: Any = STATE, rank: int = 0, ranks: int = 1, shards: Any = None) -> None:
    frozen = freeze(state, rank, (lambda: shards) if shards else no_shards)
    write_part(folder / f"rank-{rank}", frozen, step=12, quorum_id=3, rank=rank, ranks=ranks, disk=list(range(ranks)))


def read(folder: Path, rank: int = 0, shards: Any = None) -> Any:
    return read_state(folder, read_parts(folder), rank, (lambda: shards) if shards is not None else no_shards)


@pytest.mark.filterwarnings("ignore:.*support is experimental")
@settings(max_examples=25)
@given(tree=trees)
def test_any_state_there_and_back(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("state")
    state = {"train": tree}
    try:
        write(folder, state)
        assert same(read(folder), state)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(32, 64, 32, 32).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(4, 3).t(),
        torch.randn(4, 3, 2).permute(2, 0, 1),
        torch.randn(3, 1, 2),
    ],
)
def test_strides_are_kept(tensor: torch.Tensor, tmp_path: Path) -> None:
    write(tmp_path, {"t": tensor})
    received = read(tmp_path)["t"]
    assert received.stride() == tensor.stride()
    assert torch.equal(received, tensor)


def test_tensors_that_overlap_or_have_gaps_are_stored_without(tmp_path: Path) -> None:
    write(tmp_path, {"overlap": torch.ones(1).expand(4, 3), "gaps": torch.arange(10.0)[::2]})
    received = read(tmp_path)
    assert torch.equal(received["overlap"], torch.ones(4, 3))
    assert received["overlap"].is_contiguous()
    assert torch.equal(received["gaps"], torch.arange(0.0, 10, 2))


def test_other_tools_read_it(tmp_path: Path) -> None:
    folder, whole = tmp_path / "checkpoint", tmp_path / "whole.pt"
    write(folder, ranks=2)
    write(folder, rank=1, ranks=2)
    write_metadata(folder, read_parts(folder))
    weights = {"model.w": torch.zeros(2, 3)}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.load(weights, checkpoint_id=folder)
    assert torch.equal(weights["model.w"], STATE["train"]["model"]["w"])  # pyright: ignore[reportArgumentType, reportIndexIssue, reportCallIssue]
    dcp_to_torch_save(folder, whole)
    assert torch.equal(torch.load(whole)["model"]["w"], weights["model.w"])


def test_every_damage_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    write(tmp_path)
    for path in sorted((tmp_path / "rank-0").iterdir()):
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damaged in [b"", content[:-1], content + b"x", content[: len(content) // 2], bytes(flipped)]:
            path.write_bytes(damaged)
            with pytest.raises(CorruptState, match=f"{path}.* damaged"):
                read(tmp_path)
        path.write_bytes(content)
    read(tmp_path)


def test_another_format_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "FORMAT", "lighthouse-checkpoint/9")
        write(tmp_path)
    with pytest.raises(CorruptState, match="its format is lighthouse-checkpoint/9, and this version reads"):
        read_parts(tmp_path)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, rank=1, ranks=2)
    with pytest.raises(CorruptState, match="lacks the part of rank 0"):
        read_parts(tmp_path)
    with pytest.raises(CorruptState, match="holds no part"):
        read_parts(tmp_path / "rank-1")


class Explodes:
    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_no_pickle_of_the_folder_is_run(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Explodes()))
    assert same(read(tmp_path), STATE)


def test_a_failure_leaves_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_folder", fail)
        with pytest.raises(OSError, match="no space left"):
            write(tmp_path)
    with pytest.raises(TypeError, match=r"state\['hook'\]"):
        freeze({"hook": print}, 0, no_shards)
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        story.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        story.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    write(tmp_path)
    assert story == [files.TENSORS, files.PART, "rank-0.saving", "rename", tmp_path.name]


class SplitAlong:
    """Stands for the shards of one rank: chunks along a dimension, as torch.chunk makes them; the last may be empty."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def place(self, description: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape, [[_, dimension]] = list(description["shape"]), description["placements"]
        chunk = -(-shape[dimension] // self.ranks)
        begin = min(self.rank * chunk, shape[dimension])
        offset = [0] * len(shape)
        offset[dimension], shape[dimension] = begin, min(chunk, shape[dimension] - begin)
        return tuple(shape), tuple(offset)

    def describe(self, whole: torch.Tensor, dimension: int) -> dict[str, Any]:
        layout = {
            "shape": tuple(whole.shape),
            "stride": whole.stride(),
            "mesh": 0,
            "placements": (("shard", dimension),),
        }
        size, offset = self.place(layout)
        shard = whole
        for axis, (begin, length) in enumerate(zip(offset, size, strict=True)):
            shard = shard.narrow(axis, begin, length)
        return {"shard": shard.clone()} | layout


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    dimension=st.integers(0, 2),
    before=st.integers(1, 5),
    after=st.integers(0, 5),
    is_reversed=st.booleans(),
)
def test_any_number_of_ranks_reads_its_shards(
    shape: list[int],
    dimension: int,
    before: int,
    after: int,
    is_reversed: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """0 ranks after: a model that is not sharded."""
    folder = tmp_path_factory.mktemp("shards")
    whole = torch.randn(shape)
    if is_reversed:
        whole = whole.permute(tuple(reversed(range(whole.dim()))))
    dimension %= whole.dim()
    for rank in range(before):
        shards = SplitAlong(rank, before)
        write(
            folder, {"train": {"w": shards.describe(whole, dimension), "own": torch.tensor(rank)}}, rank, before, shards
        )
    parts = read_parts(folder)
    for rank in range(max(after, 1)):
        shards = SplitAlong(rank, after)
        places: Any = shards if after else []
        found: Any = read_state(folder, parts, min(rank, before - 1), lambda places=places: places)
        expected = shards.describe(whole, dimension) if after else whole
        assert same(found["train"]["w"], expected)
        assert found["train"]["own"] == min(rank, before - 1)
    shutil.rmtree(folder)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    shards = SplitAlong(1, 2)
    description = shards.describe(torch.randn(4), 0)
    frozen = freeze({"train": {"w": description}}, 1, lambda: shards)  # type: ignore[arg-type, return-value]
    write_part(tmp_path / "rank-1", frozen, step=1, quorum_id=1, rank=1, ranks=2, disk=[1])
    assert same(read(tmp_path, 1, shards)["train"]["w"], description)
    with pytest.raises(CorruptState, match=r"a part of w is missing. It was saved by 2 ranks, .* parts of ranks 1"):
        read(tmp_path, 1, SplitAlong(0, 1))
