"""Checkpoints of one replica group, from which a job continues after all of its replica groups have died.

Each replica group writes its own checkpoints into its own folder, and the groups' last checkpoints may have different
steps. Each group resumes at the step and tag of its checkpoint. In the first quorum, the groups at the highest step
send their state, and the others heal. The ranks in a group share the folder, or each has a folder on a local disk.

A checkpoint is a folder in the format of torch.distributed.checkpoint (state/files.py). The ranks write their parts
into a hidden folder without waiting for each other, and the last rank to finish renames the folder. A save runs no
collective, so a rank that dies while saving does not affect the others.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from agent_client.errors import AgentError, first_line
from agent_client.state.files import (
    SAVING,
    FrozenState,
    Part,
    freeze,
    read_parts,
    read_state,
    write_metadata,
    write_part,
)
from agent_client.state.random_state import random_state, restore_random
from agent_client.state.snapshot import StateMismatch
from agent_client.state.tree import CorruptState, State
from agent_client.step.agent import Agent
from lighthouse_protocol.messages.chaos import FaultKind
from lighthouse_protocol.messages.membership import Tag
from lighthouse_runtime.process.files import sync_folder

log = logging.getLogger(__name__)

BUSY_WAIT_S = 30.0
"""Time in seconds that `save` waits for the previous save, less than the default timeout of a collective."""
CLOSE_WAIT_S = 600.0
MOST_TAGS = 32
"""Number of newest checkpoints per rank that `resume` considers."""
COMMON = "held-by-all"
"""File in a checkpoint on a local disk, which shows that all ranks in the group have had this checkpoint."""

_STEP = r"step-(\d+)-quorum-(\d+)"
_COMPLETE = re.compile(_STEP)
_UNFINISHED = re.compile(rf"\.{_STEP}\.[0-9a-f]+(\.\d+)?")
_REMOVED = re.compile(r"\.removed-.*")

_running: dict[tuple[Path, int], threading.Thread] = {}
"""Thread of the last save by (folder, rank). Global, because a restarted wrapped function opens the folder again."""

os.register_at_fork(after_in_child=_running.clear)


class CheckpointFolder:
    """Saves and loads the checkpoints of one replica group in a folder.

    Each group of a job needs its own folder. The ranks in a group may share it, or each use a folder on a local disk. A
    checkpoint is a folder `step-N-quorum-Q` in the format of `torch.distributed.checkpoint`, with a checksum for every
    file. It also contains, for each rank, the state of the random number generators of Python, NumPy and torch.

    Example:
        ```python
        checkpoints = CheckpointFolder(f"/checkpoints/{os.environ['REPLICA_GROUP_ID']}", agent)
        checkpoints.resume()  # before the first step
        ...
        if optimizer.step() and agent.current_step % 100 == 0:
            checkpoints.save()
        ```
    """

    def __init__(self, folder: Path | str, agent: Agent, *, keep: int = 2) -> None:
        """Create the folder.

        Args:
            folder: Path of the folder.
            agent: The Agent of this rank. Its `close()` waits up to 10 minutes for a save in progress.
            keep: Number of newest checkpoints to keep, at least 2. The newest checkpoint that all ranks have is always
                kept. The disk needs space for `keep` + 1 checkpoints.

        Raises:
            ValueError: `keep` is less than 2.
            OSError: The folder cannot be created.
        """
        if keep < 2:
            raise ValueError(f"keep: {keep}; at least two, since the newest one may be damaged")
        self._folder = Path(folder).absolute()
        self._agent = agent
        self._keep = keep
        self._rank, self._ranks = agent.group_rank, agent.group_world_size
        self._disk: list[int] = []
        """Ranks that share this folder. Empty before `_prepare` is called."""
        self._nonce = ""
        self._given_up: set[Tag] = set()
        """Checkpoints of steps after the one at which the group resumed. Training will replace them."""
        self._foreign: set[Tag] = set()
        """Checkpoints that already existed, if `resume` was not called or failed. They are never removed."""
        self._own: list[Path] = []
        self._warned: set[str] = set()
        self._folder.mkdir(parents=True, exist_ok=True)
        agent.internals.attached.add(self)
        agent.internals.last_saves.append(self._save_last)

    def save(self) -> Path | None:
        """Copy the state to host memory, and write it in the background.

        Call this between two steps, at the same step on every rank in the group. If the previous save is still running,
        the call waits up to 30 s for it, and then skips this save with a warning. If writing fails, a warning is
        logged. A rank that is catching up writes nothing.

        Returns:
            The path at which the checkpoint appears once all ranks have written their parts, or None if this save was
            skipped.

        Raises:
            AgentError: This rank must heal before its state is complete again.
            TypeError: The state contains an entry that cannot be stored. The message names the entry's path.
        """
        try:
            if not self._disk:  # first, because all ranks do this together, even those without a complete state
                self._prepare()
                if self._foreign:
                    log.warning(
                        "%s holds checkpoints up to step %d that this run has not resumed. They are kept, and a later "
                        "resume() loads the newest. Call resume() before the first step, or use an empty folder",
                        self._folder,
                        max(self._foreign).step,
                    )
        except (OSError, RuntimeError) as error:
            self._warn(self._agent.current_step, error)
            return None
        if self._agent.catches_up:
            return None
        agent = self._agent.state_dict()
        tag = Tag(agent["step"], agent["tag_quorum_id"])
        if tag.quorum_id is None:  # this rank holds no complete state until it has healed
            return None
        if not self.wait(BUSY_WAIT_S):
            self._warn(tag.step, TimeoutError(f"the save before is still running after {BUSY_WAIT_S:g} s"))
            return None
        path = self._folder / _name(tag)
        state = {"agent": agent, "train": self._agent.state.state_dict(), "random": random_state()}
        frozen = freeze(state, self._rank, lambda: self._agent.state.find_shards())
        self._given_up.discard(tag)
        thread = threading.Thread(target=self._write, args=(tag, frozen), name="lighthouse checkpoint", daemon=True)
        thread.start()
        _running[self._folder, self._rank] = thread
        return path

    def _save_last(self, within_s: float) -> None:
        """Save the group's last step before its host is preempted. Wait up to `within_s` seconds for the write."""
        path = self.save()
        if path is not None and self.wait(within_s):
            log.info("%s: wrote the last step before this host ends", path)
        elif path is not None:
            log.warning("%s: was not written within %.0f s, before this host ends", path, within_s)

    def wait(self, timeout_s: float = CLOSE_WAIT_S) -> bool:
        """Wait until this rank has finished writing. Return False if it is still writing after `timeout_s` seconds."""
        thread = _running.get((self._folder, self._rank))
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Wait up to 10 minutes for a save in progress. `Agent.close` calls this method."""
        if not self.wait():
            log.warning("%s: a save is still running after %g s; it may not be complete", self._folder, CLOSE_WAIT_S)

    def resume(self) -> bool:
        """Load the newest checkpoint that all ranks in the group have.

        If the ranks' supervisors keep their state in memory (`--keep-every`) and it is newer, load that instead.

        Call this on every rank in the group before the first step. Damaged checkpoints are skipped with a warning. The
        number of ranks may have changed since the save. A rank for which the checkpoint has no part keeps the current
        state of its random number generators.

        Returns:
            True if a state was loaded, False if there is no checkpoint yet.

        Raises:
            AgentError: There are checkpoints, but none that all ranks can use. The message says why.
            StateMismatch: The checkpoint belongs to a different model.
            OSError: The folder cannot be read or written.
        """
        held, reasons = self._prepare(), list[str]()
        usable = self._usable(held, reasons)
        while True:
            rows = torch.zeros(self._ranks, MOST_TAGS, 2, dtype=torch.int64)
            for place, tag in enumerate(sorted(usable, reverse=True)[:MOST_TAGS]):
                rows[self._rank, place] = torch.tensor([tag.step + 1, tag.quorum_id])  # 0 marks an unused row
            summed: list[list[list[int]]] = self._agent.sum_over_group(rows).tolist()
            of_ranks = [{Tag(step - 1, quorum_id) for step, quorum_id in row if step} for row in summed]
            tag = newest_common(of_ranks)
            if self._agent.internals.restore_kept(above=tag):
                self._given_up = {other for other in held if other.step > self._agent.current_step}
                self._foreign.clear()
                return True
            if tag is None:
                break
            state = self._load(tag, usable[tag], reasons)
            if self._sum([int(state is None)]) == [0]:
                newest = max(other for tags in of_ranks for other in tags)
                if missing := [rank for rank, tags in enumerate(of_ranks) if newest not in tags]:
                    log.warning(
                        "resuming from step %d, not %d: no usable checkpoint of step %d on ranks %s",
                        tag.step,
                        newest.step,
                        newest.step,
                        ", ".join(map(str, missing)),
                    )
                self._given_up = {other for other in held if other > tag}
                self._restore(held[tag], state, usable[tag])
                self._foreign.clear()
                return True
            del usable[tag]
        self._refuse(held, of_ranks, reasons)
        self._given_up = set(held)
        self._foreign.clear()
        return False

    # -- called by all ranks together, before the first step or at the first save

    def _prepare(self) -> dict[Tag, Path]:
        """Find out which ranks share the folder, and remove incomplete checkpoints. Return the complete ones.

        The complete ones are never removed (`_foreign`) before `resume` returns, because a script may ignore an error
        of `resume` and continue.
        """
        self.wait()
        nonce = self._sum([secrets.randbits(48) if self._rank == 0 else 0])[0]
        self._nonce = f"{nonce:012x}"
        probe = self._folder / f".probe-{self._nonce}-{self._rank}"
        disk, held = [self._rank], dict[Tag, Path]()
        error: OSError | None = None
        try:
            probe.touch()
        except OSError as e:
            error = e
        self._sum([0])  # a barrier, after which all probe files exist
        try:
            disk = [each for each in range(self._ranks) if (self._folder / f".probe-{self._nonce}-{each}").exists()]
            if self._rank == min(disk):
                self._complete(every=True)
                for path in self._folder.iterdir():
                    if _UNFINISHED.fullmatch(path.name) or _REMOVED.fullmatch(path.name):
                        log.info("removed %s, which was incomplete", path)
                        shutil.rmtree(path, ignore_errors=True)
                    elif path.name.startswith(".probe-") and not path.name.startswith(f".probe-{self._nonce}"):
                        path.unlink(missing_ok=True)
        except OSError as e:
            error = error or e
        self._sum([0])  # after this, only complete saves exist
        try:
            held = self._held()
            probe.unlink(missing_ok=True)
        except OSError as e:
            error = error or e
        failed = self._sum([int(error is not None and rank == self._rank) for rank in range(self._ranks)])
        if error is not None:
            raise error
        if any(failed):
            raise AgentError(f"rank {failed.index(1)} cannot use its folder of checkpoints; see its log")
        self._disk, self._foreign = disk, set(held)
        return held

    def _usable(self, held: dict[Tag, Path], reasons: list[str]) -> dict[Tag, dict[int, Part]]:
        """Return the parts, by rank, of each checkpoint in `held` that this rank can load.

        Only the MOST_TAGS newest are read. For each that cannot be loaded, append the reason to `reasons`.
        """
        usable: dict[Tag, dict[int, Part]] = {}
        for tag in sorted(held, reverse=True)[:MOST_TAGS]:
            try:
                parts = read_parts(held[tag])
                part = next(iter(parts.values()))
                if (part.step, part.quorum_id) != (tag.step, tag.quorum_id):
                    raise CorruptState(f"{held[tag]} holds step {part.step}, which does not match its name")
                if part.ranks == self._ranks and self._rank not in parts:
                    raise CorruptState(
                        f"{held[tag]} holds the parts of ranks {', '.join(map(str, sorted(parts)))}, not that of rank "
                        f"{self._rank}: start each rank on the host where it ran"
                    )
                usable[tag] = parts
            except (CorruptState, OSError) as error:
                self._skip(error, reasons)
        return usable

    def _load(self, tag: Tag, parts: dict[int, Part], reasons: list[str]) -> State | None:
        rank = self._rank if self._rank in parts else min(parts)
        try:
            match state := read_state(self._folder / _name(tag), parts, rank, lambda: self._agent.state.find_shards()):
                case {"train": dict(), "agent": {"step": tag.step, "tag_quorum_id": tag.quorum_id}}:
                    return state
                case _:
                    raise CorruptState(f"{self._folder / _name(tag)} does not match its name")
        except (CorruptState, OSError) as error:
            self._skip(error, reasons)
            return None

    def _skip(self, error: Exception, reasons: list[str]) -> None:
        log.warning("skipped a checkpoint: %s", error)
        reasons.append(str(error))

    def _restore(self, path: Path, state: State, parts: dict[int, Part]) -> None:
        try:
            self._agent.state.load_state_dict(state["train"])
        except StateMismatch as error:
            raise StateMismatch(f"{path}: {error}", error.difference) from error
        try:
            self._agent.load_state_dict(state["agent"])
        except AgentError as error:
            raise AgentError(f"{path}: {error}") from error
        saved_by = next(iter(parts.values())).ranks
        if self._rank in parts:
            restore_random(state["random"])
        else:
            log.info(
                "%s was saved by %d ranks: rank %d loads the part of rank %d, and keeps the random numbers that the "
                "script has seeded",
                path,
                saved_by,
                self._rank,
                min(parts),
            )
        log.info("resumed from %s", path)

    def _refuse(self, held: dict[Tag, Path], of_ranks: Sequence[Collection[Tag]], reasons: list[str]) -> None:
        had = [tag for tag, path in held.items() if len(self._disk) == self._ranks or _was_common(path)]
        files, lost = self._sum([len(held), len(had)])
        if not files:
            return
        steps = "; ".join(
            f"rank {rank}: {', '.join(str(tag.step) for tag in sorted(tags)) or 'none'}"
            for rank, tags in enumerate(of_ranks)
        )
        text = f"{self._folder}: no checkpoint can be used by all ranks (usable steps of {steps})"
        if not lost:
            log.warning("%s: none was ever complete, so training starts at step 0. %s", text, "; ".join(reasons))
            return
        raise AgentError(
            f"{text}. {'; '.join(reasons) or 'See the logs of the other ranks'}. Repair that, or remove the files to "
            "begin at step 0"
        )

    def _sum(self, numbers: list[int]) -> list[int]:
        return self._agent.sum_over_group(torch.tensor(numbers, dtype=torch.int64)).tolist()

    # -- run on the thread of a save, during training

    def _write(self, tag: Tag, state: FrozenState) -> None:
        is_written = self._try(tag, lambda: self._write_part(tag, state))
        if self._try(tag, lambda: (self._complete(), self._rotate(tag))) and is_written and self._warned:
            log.info("%s: the part of rank %d of step %d was written", self._folder, self._rank, tag.step)
            self._warned.clear()

    def _try(self, tag: Tag, task: Callable[[], object]) -> bool:
        try:
            task()
        except Exception as error:  # noqa: BLE001  an error of the disk or a library must not end the training
            self._warn(tag.step, error)
            return False
        return True

    def _write_part(self, tag: Tag, state: FrozenState) -> None:
        for unfinished in self._own[:-1]:  # other ranks may still complete the last, and those that they are writing
            if not any(unfinished.glob(f"*{SAVING}")):
                shutil.rmtree(unfinished, ignore_errors=True)
                self._own.remove(unfinished)
        staging = self._folder / f".{_name(tag)}.{self._nonce}"
        part = staging / f"rank-{self._rank}"
        if part.exists() or (self._folder / _name(tag)).exists():
            return
        self._own.append(staging)
        if self._agent.internals.manager.watch.has_fault(FaultKind.DISK):
            raise OSError(errno.ENOSPC, "the disk is full, as `lighthouse chaos` has ordered")
        write_part(
            part,
            state,
            step=tag.step,
            quorum_id=tag.quorum_id or 0,
            rank=self._rank,
            ranks=self._ranks,
            disk=self._disk,
        )

    def _complete(self, *, every: bool = False) -> None:
        """Rename each unfinished checkpoint (a hidden folder) that has the parts of all ranks to its final name.

        Skip the checkpoints of earlier processes unless `every` is True.
        """
        ending = re.compile(rf".*\.{self._nonce}(\.{self._rank})?")
        for path in list(self._folder.iterdir()):
            found = _UNFINISHED.fullmatch(path.name)
            if not found or not (every or ending.fullmatch(path.name)):
                continue
            try:
                parts = read_parts(path)
                claimed = path
                if found[3] is None:  # the rename decides which rank continues
                    claimed = path.rename(path.with_name(f"{path.name}.{self._rank}"))
            except (CorruptState, FileNotFoundError):
                continue
            write_metadata(claimed, parts)
            sync_folder(claimed)
            try:
                claimed.rename(self._folder / _name(Tag(int(found[1]), int(found[2]))))
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                shutil.rmtree(claimed, ignore_errors=True)  # this checkpoint already exists
            sync_folder(self._folder)

    def _rotate(self, saved: Tag) -> None:
        """Remove old checkpoints, except the `keep` newest ones and the newest one that all ranks have.

        `saved` is the tag (step and quorum) of the state that was just saved. Remove none if it is unknown which
        checkpoints the other ranks have.
        """
        held = {tag: path for tag, path in self._held().items() if tag not in self._foreign}
        self._given_up |= {tag for tag in held if tag > saved}
        counted = held.keys() - self._given_up
        of_ranks = self._held_by_ranks(counted)
        if of_ranks is None:
            return
        common = newest_common(of_ranks)
        if common is not None and len(self._disk) < self._ranks:
            (held[common] / COMMON).touch()
        kept = {common, *sorted(counted, reverse=True)[: self._keep]}
        for tag in held.keys() - kept:
            with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                removed = held[tag].rename(self._folder / f".removed-{_name(tag)}-{secrets.token_hex(4)}")
                shutil.rmtree(removed, ignore_errors=True)

    def _held_by_ranks(self, own: Collection[Tag]) -> Sequence[Collection[Tag]] | None:
        """Return each rank's checkpoints after its last save, as tags (step and quorum), or None if unknown.

        `own` has the tags of this rank. If the ranks share the folder, the result is just `[own]`. Otherwise they
        exchange their tags in the group's store.
        """
        if len(self._disk) == self._ranks:
            return [own]
        group = self._agent.internals.place.group
        if group is None:
            return None
        store = group.store
        key = f"checkpoints/{self._nonce}/"
        store.set(f"{key}{self._rank}", json.dumps(sorted(own)))
        keys = [f"{key}{rank}" for rank in range(self._ranks)]
        if not store.check(keys):
            return None
        return [{Tag(*each) for each in json.loads(store.get(other))} for other in keys]

    def _warn(self, step: int, error: Exception) -> None:
        kind = f"{type(error).__name__} {getattr(error, 'errno', None)}"
        if kind in self._warned:
            return
        self._warned.add(kind)
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        log.warning(
            "%s: the checkpoint of step %d was not written: %s: %s. Training continues; the next save tries again. %s",
            self._folder,
            step,
            type(error).__name__,
            first_line(error),
            f"Make room on that disk: it has to hold {self._keep + 1} checkpoints"
            if is_full
            else "Check that disk, or save less often",
        )

    def _held(self) -> dict[Tag, Path]:
        found = ((_COMPLETE.fullmatch(path.name), path) for path in self._folder.iterdir())
        return {Tag(int(match[1]), int(match[2])): path for match, path in found if match}


def newest_common(held: Sequence[Collection[Tag]]) -> Tag | None:
    common = set(held[0]).intersection(*held[1:])
    return max(common, default=None)


def _name(tag: Tag) -> str:
    return f"step-{tag.step:012}-quorum-{tag.quorum_id}"


def _was_common(path: Path) -> bool:
    """Return whether all ranks have had the checkpoint at `path`. If it is unreadable, assume that they have.

    They have had it if they shared the folder, or if the checkpoint contains the file COMMON.
    """
    try:
        part = next(iter(read_parts(path).values()))
    except (CorruptState, OSError):
        return True  # unknown, so assume that all had it: a checkpoint that is now missing is then reported
    return len(part.disk) == part.ranks or (path / COMMON).exists()
