"""What every test runs under."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Daemons that tests start remember nothing, unless a test says so.
os.environ.setdefault("LIGHTHOUSE_JOURNAL", "none")
# Nor does this user's state directory: credentials, and which ports are served, are this process's alone.
_STATE = tempfile.TemporaryDirectory(prefix="lighthouse-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# Daemons that tests start would inherit what is ignored: SIGHUP under nohup, SIGINT and SIGQUIT in the background of a
# shell. They do not inherit a handler.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# The machines are shared: how long an example takes says nothing about the code.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("project")

_LINES = Path(__file__).with_name("known_defects.txt").read_text().splitlines()
KNOWN_DEFECTS = {line for line in _LINES if line and not line.startswith("#")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in KNOWN_DEFECTS:
            item.add_marker(pytest.mark.xfail(reason="tests/known_defects.txt", strict=False))


_ENDS_AT = float(os.environ.get("TESTS_END_AT") or "inf")  # seconds since 1970


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A run that has to end in time begins nothing after that, and says what it has left out."""
    if time.time() >= _ENDS_AT:
        pytest.skip("left out: the time of this run is over (TESTS_END_AT)")
