"""Drawn spoilings of a journal: no id is named twice, ever; a lighthouse goes on, or refuses and says what to do.

The oracle is outside of the product: it keeps each id that left a lighthouse, with its list of participants.
"""

import errno
import random
import shutil
from pathlib import Path

import pytest

from lighthouse.store.sqlite import Journal, sibling_path
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.refusals import LighthouseError
from tests.lighthouse.lives import FIRST_WALL_MS, Life, Manager, beat_for
from tests.virtual_loop import VirtualLoop

REMEDIES = ("move it away (and keep it)", "name another file", "free space on its disk", "stop that one", "restart it")


class Oracle:
    def __init__(self) -> None:
        self.named: dict[int, tuple[object, ...]] = {}

    def heard(self, quorum: Quorum) -> None:
        members = tuple(participant.identity for participant in quorum.participants)
        assert self.named.setdefault(quorum.quorum_id, members) == members, f"{quorum.quorum_id} names two lists"


class Story:
    def __init__(self, seed: int, loop: VirtualLoop, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.loop, self.folder, self.monkeypatch = loop, folder, monkeypatch
        self.path = folder / "journal.sqlite"
        self.oracle = Oracle()
        self.lives = 0
        self.copies: list[tuple[Path, Path | None]] = []
        self.said: list[str] = []

    def live(self) -> None:
        """One life: groups come, some with what they were told before, quorums form, members are lost."""
        self.lives += 1
        lease_s = self.random.choice([2.0, 5.0])
        try:
            life = Life(self.loop, self.path, self.oracle.heard, lease_s=lease_s)
        except LighthouseError as e:
            self.said.append(str(e))
            assert any(remedy in str(e) for remedy in REMEDIES), e
            self.path.rename(self.folder / f"away{self.lives}")  # as the refusal has it
            life = Life(self.loop, self.path, self.oracle.heard, lease_s=lease_s)
        managers = [
            Manager(name, f"i{self.lives}", seen=self._seen()).connect(life)
            for name in self.random.sample("abcd", self.random.randint(1, 3))
        ]
        try:
            self._train(life, managers, lease_s)
        except LighthouseError as e:
            assert life.gave_up
            assert any(remedy in str(e) for remedy in REMEDIES), e
        life.die()
        self.loop.go(1)

    def _seen(self) -> int:
        """Some were told the newest; most have forgotten."""
        return max(self.oracle.named, default=0) if self.random.random() < 0.2 else 0

    def _train(self, life: Life, managers: list[Manager], lease_s: float) -> None:
        if self.random.random() < 0.15:
            self._fill_the_disk()
        for manager in managers:
            manager.join()
        beat_for(self.loop, managers, lease_s + 1)
        self._copy()
        for _ in range(self.random.randint(0, 3)):
            for manager in managers:
                manager.close()
                manager.incarnation += "+"
                manager.held = None
                manager.connect(life).join()
            beat_for(self.loop, managers, 1)
            if self.random.random() < 0.3:
                self._copy()

    def _copy(self) -> None:
        copy = self.folder / f"copy{len(self.copies)}"
        shutil.copyfile(self.path, copy)
        log, log_copy = sibling_path(self.path, "-wal"), None
        if log.exists():
            log_copy = sibling_path(copy, "-wal")
            shutil.copyfile(log, log_copy)
        self.copies.append((copy, log_copy))

    def _fill_the_disk(self) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.monkeypatch.setattr(Journal, "_check_term", full)

    def spoil(self) -> None:
        self.monkeypatch.undo()
        kind = self.random.choice(
            ["nothing", "restore", "restore", "no log", "torn log", "bits", "cut", "gone", "away"]
        )
        log = sibling_path(self.path, "-wal")
        raw = self.path.read_bytes() if self.path.exists() else b""
        match kind:
            case "restore" if self.copies:
                copy, log_copy = self.random.choice(self.copies)
                shutil.copyfile(copy, self.path)
                if log_copy is not None and self.random.random() < 0.5:
                    shutil.copyfile(log_copy, log)
            case "no log":
                log.unlink(missing_ok=True)
            case "torn log":
                log.write_bytes(self.random.randbytes(self.random.choice([1, 32, 5000])))
            case "bits" if raw:
                damaged = bytearray(raw)
                for _ in range(self.random.randint(1, 4)):
                    damaged[self.random.randrange(len(damaged))] ^= 1 << self.random.randrange(8)
                self.path.write_bytes(damaged)
            case "cut" if raw:
                self.path.write_bytes(raw[: self.random.randrange(len(raw))])
            case "gone":
                self.path.unlink(missing_ok=True)
            case "away" if raw:  # a copy on another host, without what is sibling_path it
                self.folder = self.folder / f"host{self.lives}"
                self.folder.mkdir()
                self.path = self.folder / "journal.sqlite"
                self.path.write_bytes(raw)
            case _:
                pass


def tell(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(seed, VirtualLoop(), folder, monkeypatch)
    for _ in range(4):
        story.live()
        story.spoil()
    story.live()
    assert story.oracle.named, "nothing has formed"
    assert min(story.oracle.named) >= FIRST_WALL_MS


QUICK = [range(n, n + 6) for n in range(0, 24, 6)]
MANY = [range(n, n + 25) for n in range(100, 225, 25)]


@pytest.mark.parametrize("seeds", [*QUICK, *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in MANY)], ids=str)
def test_no_id_is_named_twice_whatever_becomes_of_the_journal(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:  # four spoilings each
        folder = tmp_path / str(seed)
        folder.mkdir()
        tell(seed, folder, monkeypatch)
