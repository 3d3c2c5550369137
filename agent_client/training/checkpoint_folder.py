"""Checkpoints on disk of one rank, and how a job goes on from them when all of its replica groups have died.

    checkpoints = CheckpointFolder(folder, agent)
    checkpoints.resume()                                   # before the first step
    ...
    if optimizer.step() and agent.current_step % 100 == 0:
        checkpoints.save()

Each rank has files of its own, on a disk of its host's or on a shared one. The ranks of a group go on from the newest
one that all of them hold whole. The groups need not have the same: each begins at the step and tag of its own, and the
first quorum sees to the rest: those at the highest step are the source, the others heal.
"""

import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from agent_client.agent.agent import Agent
from agent_client.state.files import read_state, write_state
from agent_client.state.snapshot import StateMismatch
from agent_client.state.tree import CorruptState, State
from lighthouse_protocol.messages.membership import Tag

log = logging.getLogger(__name__)


class CheckpointFolder:
    """Keeps the newest `keep` of this rank; at least two, since its peers in the group may die before they have
    written theirs. Groups that share a disk need a folder each."""

    def __init__(self, folder: Path | str, agent: Agent, *, keep: int = 2) -> None:
        """Raises ValueError for fewer than two."""
        if keep < 2:
            raise ValueError(f"keep: {keep}; at least two, since the ranks of a group do not write at the same moment")
        self._folder = Path(folder)
        self._agent = agent
        self._keep = keep
        self._name = re.compile(rf"step-(\d+)-quorum-(\d+)-rank-{agent.group_rank}\.state")
        self._folder.mkdir(parents=True, exist_ok=True)

    def save(self) -> Path | None:
        """Between two steps, in every rank of the group at the same one. The files of older steps are removed. A rank
        that catches up holds nothing new, and writes nothing."""
        if self._agent.catches_up:
            return None
        agent = self._agent.state_dict()
        tag = Tag(agent["step"], agent["tag_quorum_id"])
        path = self._path(tag)
        write_state(path, {"agent": agent, "train": self._agent.state.state_dict()})
        older = sorted(other for other in self._held() if other != tag)
        for other in older[: max(0, len(older) + 1 - self._keep)]:
            self._path(other).unlink(missing_ok=True)
        return path

    def resume(self) -> bool:
        """Take over the newest state that all ranks of the group hold whole. False: there is none.

        In every rank of the group, before the first step. StateMismatch where it is that of another model.
        """
        held = self._held()
        while (tag := newest_common(self._of_all_ranks(held))) is not None:
            state = self._load(tag)  # None: it is damaged
            if self._agent.sum_over_group(torch.tensor([int(state is None)])).item() == 0:
                self._take_over(self._path(tag), state)
                return True
            held.discard(tag)
        return False

    def _take_over(self, path: Path, state: State) -> None:
        try:
            self._agent.state.load_state_dict(state["train"])
        except StateMismatch as error:
            raise StateMismatch(f"{path}: {error}") from error
        self._agent.load_state_dict(state["agent"])
        log.info("resumed from %s", path)

    def _load(self, tag: Tag) -> State | None:
        path = self._path(tag)
        try:
            match state := read_state(path):
                case {"train": dict(), "agent": {"step": tag.step, "tag_quorum_id": tag.quorum_id}}:
                    return state
                case _:
                    raise CorruptState(f"{path} does not hold what its name says")
        except (CorruptState, OSError) as error:
            log.warning("a checkpoint is passed over: %s", error)
            return None

    def _of_all_ranks(self, held: Collection[Tag]) -> list[set[Tag]]:
        """What each rank of the group holds."""
        agent = self._agent
        rows = torch.zeros(agent.group_world_size, self._keep, 2, dtype=torch.int64)
        for place, tag in enumerate(sorted(held, reverse=True)[: self._keep]):
            rows[agent.group_rank, place] = torch.tensor([tag.step + 1, tag.quorum_id])  # 0 is an empty place
        summed: list[list[list[int]]] = agent.sum_over_group(rows).tolist()
        return [{Tag(step - 1, quorum_id) for step, quorum_id in row if step} for row in summed]

    def _held(self) -> set[Tag]:
        matches = map(self._name.fullmatch, (path.name for path in self._folder.iterdir()))
        return {Tag(int(match[1]), int(match[2])) for match in matches if match}

    def _path(self, tag: Tag) -> Path:
        return self._folder / f"step-{tag.step:012}-quorum-{tag.quorum_id}-rank-{self._agent.group_rank}.state"


def newest_common(held: Sequence[Collection[Tag]]) -> Tag | None:
    """The newest that every rank holds."""
    common = set(held[0]).intersection(*held[1:])
    return max(common, default=None)
