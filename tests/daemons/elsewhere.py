"""Another host, as far as a daemon can tell: a network namespace with a cable to this one. Needs root."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_PREFIX = "lighthouse-test-"


@dataclass(frozen=True)
class Elsewhere:
    """`here` is this host's address as seen from there; `command` in front of a program runs it there."""

    here: str
    there: str
    command: tuple[str, ...]

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """The cable carries nothing. Neither side is told."""
        far_end = ("-n", self.command[3], "link", "set", "eth0")
        _ip(*far_end, "down")
        try:
            yield
        finally:
            _ip(*far_end, "up")


@contextlib.contextmanager
def another_host() -> Iterator[Elsewhere]:
    """Skips the test where no namespace can be made. Nothing of it stays."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace is made by root only")
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed: apt-get install iproute2")
    _clean_up_after_the_killed()
    pid = os.getpid()
    name, cable = f"{_PREFIX}{pid}", f"lht{pid}"
    # 198.18.0.0/15 is kept for tests of networks: two test runs at once get two networks of it
    network = f"198.{18 + (pid >> 14 & 1)}.{pid >> 6 & 255}.{(pid & 63) << 2}"
    base, _, last = network.rpartition(".")
    here, there = f"{base}.{int(last) + 1}", f"{base}.{int(last) + 2}"
    with contextlib.ExitStack() as stack:
        try:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            stack.callback(_ip, "link", "del", cable)
        except subprocess.CalledProcessError as e:
            pytest.skip(f"no network namespace here: {e.stderr.strip()}")
        _ip("addr", "add", f"{here}/30", "dev", cable)
        _ip("link", "set", cable, "up")
        _ip("-n", name, "addr", "add", f"{there}/30", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield Elsewhere(here, there, ("ip", "netns", "exec", name))


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _clean_up_after_the_killed() -> None:
    """A test run that was killed could not."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        pid = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and not Path("/proc", pid).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # another test run that cleans up was faster
                _ip("netns", "del", name)
