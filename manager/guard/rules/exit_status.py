"""An exit status in words."""

import signal


def described(status: int) -> str:
    """For people: exit code 1, SIGSEGV."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"{name} (kill -9, or the kernel was out of memory)" if name == "SIGKILL" else name
