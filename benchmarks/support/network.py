"""A second host on this machine: a network namespace behind a virtual cable with limited bandwidth."""

import subprocess
from os import getpid
from types import TracebackType
from typing import Self


class SecondHost:
    """A numbered network namespace, which can send up to `mb_per_s` times 10^6 bytes per second.

    Requires the permission to administer the network, which `is_possible` checks.
    """

    def __init__(self, number: int = 0, mb_per_s: float = 100.0) -> None:
        self._name = f"lighthouse{getpid()}-{number}"
        self._ours, self._theirs = f"lh{getpid()}a{number}", f"lh{getpid()}b{number}"
        network = f"198.18.{77 + number}"  # RFC 2544 reserves this range for benchmarks
        self._our_address, self.address = f"{network}.1", f"{network}.2"
        self._limit = ("rate", f"{mb_per_s * 8:g}mbit", "burst", "256kb", "latency", "50ms")

    @property
    def within(self) -> tuple[str, ...]:
        """Command prefix that runs another command in the namespace."""
        return ("ip", "netns", "exec", self._name)

    def __enter__(self) -> Self:
        there = ("ip", "-n", self._name)
        try:
            _run("ip", "netns", "add", self._name)
            _run("ip", "link", "add", self._ours, "type", "veth", "peer", "name", self._theirs, "netns", self._name)
            _run("ip", "addr", "add", f"{self._our_address}/30", "dev", self._ours)
            _run("ip", "link", "set", self._ours, "up")
            _run(*there, "addr", "add", f"{self.address}/30", "dev", self._theirs)
            _run(*there, "link", "set", "lo", "up")
            _run(*there, "link", "set", self._theirs, "up")
            _run("tc", "-n", self._name, "qdisc", "add", "dev", self._theirs, "root", "tbf", *self._limit)
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._tear_down()

    def _tear_down(self) -> None:
        _run("ip", "link", "del", self._ours, check=False)
        _run("ip", "netns", "del", self._name, check=False)


def is_possible() -> bool:
    try:
        with SecondHost():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)
