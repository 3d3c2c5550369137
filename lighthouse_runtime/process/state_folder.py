"""The folder in which the user's daemons store persistent files."""

import os
from pathlib import Path

from lighthouse_protocol.refusals import InvalidRequest


def state_folder(option: str) -> Path:
    """Return `lighthouse` in the user's state directory (XDG). The folder may not exist.

    Raises:
        InvalidRequest: The user has no home directory. The message names `option`, which can set another path.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise InvalidRequest("this user has no home directory; name a path", field=option) from None
    return folder / "lighthouse"


def make_private(folder: Path) -> None:
    """Create `folder` and its missing parents, accessible to this user only. Raises OSError."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by this user only. Raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
