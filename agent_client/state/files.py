"""Reads and writes one rank's part of a checkpoint with torch.distributed.checkpoint (DCP).

    step-000000000100-quorum-7/
        .metadata          for other readers (`torch.distributed.checkpoint.load`, `dcp_to_torch_save`); never read here
        rank-0/__0_0.distcp   the tensors of rank 0, in DCP's format
        rank-0/part.json      everything else of rank 0: plain values, the layout of each tensor, a checksum of the file
        rank-1/...

DCP's own metadata is a pickle, so `part.json` contains what DCP needs to find a tensor. Nothing that is unpickled here
can execute code, because DCP loads tensors with `weights_only`. A sharded tensor has the same name in all parts, and
each part contains one chunk of the tensor, so any number of ranks can load it. The names of other tensors contain the
rank, except those of rank 0.
"""

import hashlib
import json
import os
import re
import shutil
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agent_client.state.shards import Shards, is_description, without_descriptions
from agent_client.state.snapshot import copy_of
from agent_client.state.tree import DTYPES, CorruptState, Json, State, assemble, disassemble
from lighthouse_runtime.process.files import sync_folder

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

FORMAT = "lighthouse-checkpoint/1"
PART, TENSORS = "part.json", "__0_0.distcp"
SAVING = ".saving"
"""End of the name of a rank's folder until its part is complete."""
_RANK = re.compile(r"rank-(\d+)")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Location of one tensor in a rank's file and, if the tensor is a shard, inside the whole tensor."""

    name: str
    """Path of the tensor in the state, joined with dots. On ranks other than 0, it begins with the rank unless the
    tensor is sharded."""
    dtype: str
    whole: list[int]
    offset: list[int]
    size: list[int]
    stride: list[int]
    layout: Json
    """Description of a sharded tensor (shards.py) without the shard itself, or None for an unsharded tensor."""
    start: int = 0
    length: int = 0
    """Number of bytes in the file, or 0 for an empty shard, which is not stored."""

    @property
    def is_stored(self) -> bool:
        return 0 not in self.size or 0 in self.whole


@dataclass(frozen=True, slots=True)
class FrozenState:
    """Copy of a state on the CPU, to be written while training continues."""

    skeleton: Json
    chunks: list[Chunk]
    tensors: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    step: int
    quorum_id: int
    rank: int
    ranks: int
    disk: list[int]
    """Ranks whose parts are in the same folder."""
    skeleton: Json
    chunks: list[Chunk]
    file_bytes: int
    sha256: str


def freeze(state: State, rank: int, find_shards: Callable[[], Shards]) -> FrozenState:
    """Copy the state of rank `rank` to the CPU. `state` contains descriptions (shards.py) in place of sharded tensors.

    `find_shards` returns a `Shards` for the current sharding, and is called only if `state` contains a description.

    Raises:
        TypeError, ValueError: An entry cannot be stored. The message contains its path.
    """
    skeleton, tensors = disassemble(state)
    chunks: list[Chunk] = []
    shards: Shards | None = None
    names: set[str] = set()
    for (path, layout), tensor in zip(_leaves(state, ()), tensors, strict=True):
        name = ".".join(map(str, path[1:] if path[0] == "train" else path))
        while name in names:
            name += "'"
        names.add(name)
        whole, offset = list(tensor.shape), [0] * tensor.dim()
        if layout is not None:
            shards = shards or find_shards()
            whole, offset = list(layout["shape"]), list(shards.place(layout)[1])
            layout = {key: value for key, value in layout.items() if key != "shard"}
        elif rank:
            name = f"rank-{rank}/{name}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        chunks.append(Chunk(name, dtype, whole, offset, list(tensor.shape), list(tensor.stride()), layout))
    return FrozenState(skeleton, chunks, [copy_of(tensor.detach()) for tensor in tensors])


def write_part(
    folder: Path, state: FrozenState, *, step: int, quorum_id: int, rank: int, ranks: int, disk: list[int]
) -> None:
    """Write the part of rank `rank` into a new folder `folder`. The part is complete once this folder exists.

    `step` and `quorum_id` are the tag of the state, and `ranks` is the number of ranks in the group. `disk` lists the
    ranks whose parts are in the same checkpoint folder.
    """
    temporary = folder.with_name(f"{folder.name}{SAVING}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        chunks = _write_tensors(temporary, state)
        tensors = temporary / TENSORS
        part = Part(
            step, quorum_id, rank, ranks, disk, state.skeleton, chunks, tensors.stat().st_size, _checksum(tensors)
        )
        text = json.dumps(asdict(part))
        with (temporary / PART).open("w") as file:
            json.dump({"format": FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest(), "part": text}, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_parts(folder: Path) -> dict[int, Part]:
    """Read everything in a checkpoint except its tensors. Return the parts by rank.

    Raise CorruptState, which names the file, if the checkpoint is damaged, incomplete or of another format version.
    """
    found = [_read_part(path) for path in folder.iterdir() if _RANK.fullmatch(path.name)]
    parts = {part.rank: part for part in found}
    if not parts:
        raise CorruptState(f"{folder} holds no part of any rank")
    if missing := set(next(iter(parts.values())).disk) - parts.keys():
        raise CorruptState(f"{folder} lacks the part of rank {min(missing)}")
    return parts


def read_state(folder: Path, parts: Mapping[int, Part], rank: int, find_shards: Callable[[], Shards]) -> State:
    """Read the state of one rank, with its tensors on the CPU.

    `parts` is the result of `read_parts`. `find_shards` returns a `Shards` for the current sharding, and is called only
    if the saved state is sharded. Raise CorruptState, which names the folder, if the checkpoint is damaged or
    incomplete.
    """
    part = parts[rank]
    shards = find_shards() if any(chunk.layout for chunk in part.chunks) else None
    targets, offsets = list[torch.Tensor](), list[list[int]]()
    for chunk in part.chunks:
        size, offset = chunk.size, chunk.offset
        if chunk.layout is not None and shards:
            size, offset = map(list, shards.place(chunk.layout))
        elif chunk.layout is not None:
            size, offset = chunk.whole, [0] * len(chunk.whole)
        targets.append(_empty(size, chunk))
        offsets.append(offset)
    try:
        _read_tensors(folder, parts, part.chunks, targets, offsets)
    except OSError:
        raise
    except Exception as error:  # torch raises unrelated exceptions for unreadable bytes
        raise CorruptState(f"{folder} cannot be used: {error}") from error
    state = assemble(part.skeleton, targets)
    return state if shards or shards is None else without_descriptions(state)


def write_metadata(folder: Path, parts: Mapping[int, Part]) -> None:
    """Write the index of torch.distributed.checkpoint (DCP), with which other programs can load the checkpoint."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.storage import WriteResult

    metadata = _metadata(parts)
    written = [WriteResult(index, place.length, place) for index, place in metadata.storage_data.items()]
    FileSystemWriter(folder).finish(metadata, [written])


def _leaves(node: State, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any] | None]]:
    """Yield the path and the description (shards.py) of each tensor, in the order of `disassemble`.

    The description of an unsharded tensor is None.
    """
    if isinstance(node, torch.Tensor | bytes | np.ndarray):
        yield path, None
    elif is_description(node):
        yield path, node
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(child, (*path, key))
        if isinstance(node, OrderedDict):
            yield from _leaves(getattr(node, "_metadata", None), (*path, "_metadata"))
    elif isinstance(node, list | tuple | deque):
        for index, child in enumerate(node):
            yield from _leaves(child, (*path, index))


def _empty(size: list[int], chunk: Chunk) -> torch.Tensor:
    """Return an uninitialized tensor of shape `size`, with the dtype and the memory order of `chunk`."""
    dtype = DTYPES[chunk.dtype]
    if size == chunk.size:
        return torch.empty_like(torch.empty_strided(size, chunk.stride, dtype=dtype, device="meta"), device="cpu")
    strides = chunk.layout["stride"] if chunk.layout else chunk.stride  # the sharding differs from the saved one
    order = sorted(range(len(size)), key=lambda dimension: -strides[dimension])
    return torch.empty([size[dimension] for dimension in order], dtype=dtype).permute(
        [order.index(dimension) for dimension in range(len(size))]
    )


def _write_tensors(folder: Path, state: FrozenState) -> list[Chunk]:
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    tensors = {chunk.name: tensor for chunk, tensor in zip(state.chunks, state.tensors, strict=True)}

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
            return tensors[index.fqn].resolve_conj().resolve_neg()

    items = [
        WriteItem(
            index=MetadataIndex(chunk.name, chunk.offset),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)),
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(chunk.whole),
            ),
        )
        for chunk, tensor in zip(state.chunks, state.tensors, strict=True)
        if chunk.is_stored
    ]
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(True)
    [plan] = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    written = writer.write_data(plan, Planner()).wait()
    places: dict[str, Any] = {result.index.fqn: result.storage_data for result in written}
    return [
        replace(chunk, start=place.offset, length=place.length) if (place := places.get(chunk.name)) else chunk
        for chunk in state.chunks
    ]


def _read_tensors(
    folder: Path,
    parts: Mapping[int, Part],
    chunks: list[Chunk],
    targets: list[torch.Tensor],
    offsets: list[list[int]],
) -> None:
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    by_name = {chunk.name: target for chunk, target in zip(chunks, targets, strict=True)}

    class Planner(DefaultLoadPlanner):
        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            return by_name[index.fqn]

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            """Do nothing. DCP has already copied the data, because `tensor` is a view of the target."""

    metadata = _metadata(parts)
    items: list[ReadItem] = []
    for chunk, target, offset in zip(chunks, targets, offsets, strict=True):
        if not target.numel():
            continue
        stored: Any = metadata.state_dict_metadata.get(chunk.name)
        wanted = ChunkStorageMetadata(torch.Size(offset), target.shape)
        found = create_read_items_for_chunk_list(chunk.name, stored, [wanted]) if stored else []
        if sum(torch.Size(item.lengths).numel() for item in found) != target.numel():
            raise ValueError(
                f"a part of {chunk.name} is missing. It was saved by {parts[min(parts)].ranks} ranks, and this folder "
                f"holds the parts of ranks {', '.join(map(str, sorted(parts)))}. Start as many ranks, each with its "
                "own folder, or copy the parts of all ranks into one folder"
            )
        items += found
    used = {metadata.storage_data[item.storage_index].relative_path for item in items}
    for rank, part in sorted(parts.items()):
        relative_path = f"rank-{rank}/{TENSORS}"
        if relative_path not in used:
            continue
        path = folder / relative_path
        if (size := path.stat().st_size) != part.file_bytes:
            raise ValueError(f"{path} is damaged: it has {size} bytes instead of {part.file_bytes}")
        if _checksum(path) != part.sha256:
            raise ValueError(f"{path} is damaged: its checksum differs")
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(LoadPlan(items), Planner()).wait()


def _metadata(parts: Mapping[int, Part]) -> "Metadata":
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    files: dict[MetadataIndex, Any] = {}
    for rank, part in parts.items():
        for chunk in filter(lambda chunk: chunk.is_stored, part.chunks):
            properties = TensorProperties(dtype=DTYPES[chunk.dtype])
            tensor = tensors.setdefault(chunk.name, TensorStorageMetadata(properties, torch.Size(chunk.whole), []))
            index = MetadataIndex(chunk.name, chunk.offset, len(tensor.chunks))
            if index not in files:  # otherwise, the chunk is a second copy
                tensor.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)))
                files[index] = _StorageInfo(f"rank-{rank}/{TENSORS}", chunk.start, chunk.length)
    paths = {name: tuple(name.split(".")) for name in tensors}
    return Metadata(tensors, planner_data=paths, storage_data=files)


def _read_part(folder: Path) -> Part:
    path = folder / PART
    try:
        outer = json.loads(path.read_text())
        if outer["format"] != FORMAT:
            raise CorruptState(
                f"{path} cannot be used: its format is {outer['format']}, and this version reads {FORMAT}"
            )
        if hashlib.sha256(outer["part"].encode()).hexdigest() != outer["sha256"]:
            raise CorruptState(f"{path} cannot be used: it is damaged, its checksum differs")
        inner: dict[str, Any] = json.loads(outer["part"])
        inner["chunks"] = chunks = [Chunk(**chunk) for chunk in inner["chunks"]]
        if unknown := sorted({chunk.dtype for chunk in chunks} - DTYPES.keys()):
            raise CorruptState(f"{path} cannot be used: torch {torch.__version__} has no dtype {unknown[0]}")
        return Part(**inner)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptState(f"{path} cannot be used: it is damaged: {error}") from error


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
