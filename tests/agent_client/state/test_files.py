"""A file holds a whole state or is refused by name, whatever happens while it is written."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_client.state import files
from agent_client.state.decoding import CorruptState
from agent_client.state.encoding import Encoding
from agent_client.state.files import read_state, write_state
from tests.agent_client.state.trees import same

STATE = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 12}
OTHER = {"model": {"w": torch.zeros(2, 3)}, "step": 13}


def test_there_and_back(tmp_path: Path) -> None:
    write_state(tmp_path / "a", STATE)
    assert same(read_state(tmp_path / "a"), STATE)
    write_state(tmp_path / "a", OTHER)
    assert same(read_state(tmp_path / "a"), OTHER)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_every_damage_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_state(path, STATE)
    content = path.read_bytes()
    for damaged in [b"", content[:-1], content + b"x", content[: len(content) // 2], b"PK" + content[2:]]:
        path.write_bytes(damaged)
        with pytest.raises(CorruptState, match=f"^{path} cannot be used: "):
            read_state(path)


def test_a_failure_leaves_the_former_and_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_state(path, STATE)

    def fail(encoding: Encoding, start: int) -> Any:
        yield memoryview(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Encoding, "chunks", fail)
        with pytest.raises(OSError, match="no space left"):
            write_state(path, OTHER)
    with pytest.raises(TypeError, match=r"state\['hook'\]"):
        write_state(path, {"hook": print})
    assert same(read_state(path), STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        story.append("bytes" if name.endswith(".tmp") else "folder")
        fsync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        story.append("name")
        return replace(path, target)

    monkeypatch.setattr(files.os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_state(tmp_path / "a", STATE)
    assert story == ["bytes", "name", "folder"]


WRITER = """
import sys, torch
from pathlib import Path
from agent_client.state.files import write_state
path, number = Path(sys.argv[1]), 0
while True:
    number += 1
    write_state(path, {"w": torch.full((2**18,), number), "number": number})
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        for _ in range(20):
            told = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
    state = read_state(path)
    assert state["number"] >= told
    assert set(state["w"].tolist()) == {state["number"]}
