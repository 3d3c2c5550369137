"""Where daemons of this user keep what outlives them."""

import os
from pathlib import Path

from lighthouse_protocol.refusals import InvalidRequest


def state_folder(option: str) -> Path:
    """In the user's state directory, as the XDG base directory specification has it; it need not exist.

    Raises InvalidRequest naming `option`, which could name another place, for a user without a home directory.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise InvalidRequest("this user has no home directory; name a place for it", field=option) from None
    return folder / "lighthouse"


def write_private(path: Path, content: bytes) -> None:
    """Replace `path` in one step, readable by this user alone. Raises OSError."""
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
