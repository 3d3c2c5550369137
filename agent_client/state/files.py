"""A state in a file: whole or not at all, checksummed, without pickle (encoding.py)."""

import os
from contextlib import suppress
from pathlib import Path

from agent_client.state.decoding import CorruptState, decode, encode
from agent_client.state.tree import State


def write_state(path: Path, state: State) -> None:
    """Write `state` so that at any moment, and after a crash, `path` holds what it held before or all of this.

    TypeError or ValueError, with the path inside the state, for what cannot be kept; OSError.
    """
    encoding = encode(state)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for chunk in encoding:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read_state(path: Path) -> State:
    """Its tensors on the CPU. CorruptState, naming the file, if it is damaged or something else; OSError."""
    with path.open("rb", buffering=0) as file:
        try:
            return decode(file, os.fstat(file.fileno()).st_size)
        except CorruptState as error:
            raise CorruptState(f"{path} cannot be used: {error}") from error


def _sync_folder(folder: Path) -> None:
    """Or else a crash may forget the new name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
