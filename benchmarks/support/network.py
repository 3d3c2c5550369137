"""A second host on this machine: a network namespace, joined to ours by a virtual cable that can be pulled."""

import os
import subprocess
from types import TracebackType
from typing import Self

# Of the range that RFC 2544 keeps for benchmarks.
OUR_ADDRESS = "198.18.77.1"
THEIR_ADDRESS = "198.18.77.2"


class Switch:
    """Joins second hosts to each other, and not to ours."""

    def __init__(self) -> None:
        self.name = f"lh{os.getpid()}s"

    def __enter__(self) -> Self:
        _ip("link", "add", self.name, "type", "bridge")
        _ip("link", "set", self.name, "up")
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        subprocess.run(["ip", "link", "del", self.name], check=False, capture_output=True)


class SecondHost:
    """Needs the right to administer the network; `is_possible` says whether we have it. `number`: of several, each with
    a cable of its own: to us, or to `switch`. `mb_per_s`: what it can send, in 10^6 bytes; 0: as much as it likes."""

    def __init__(self, number: int = 0, mb_per_s: float = 0.0, switch: Switch | None = None) -> None:
        self._name = f"lighthouse{os.getpid()}-{number}"
        self._ours, self._theirs = f"lh{os.getpid()}a{number}", f"lh{os.getpid()}b{number}"
        self._switch = switch
        self._our_address = _next_network(OUR_ADDRESS, number)
        self.address = _next_network(THEIR_ADDRESS, number)
        """Where we reach it."""
        self._mb_per_s = mb_per_s

    @property
    def within(self) -> tuple[str, ...]:
        """The command that executes another one there."""
        return ("ip", "netns", "exec", self._name)

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._tear_down()

    def pull(self) -> None:
        """What is sent from either side is lost from now on; nobody is told."""
        _ip("-n", self._name, "link", "set", self._theirs, "down")

    def plug(self) -> None:
        _ip("-n", self._name, "link", "set", self._theirs, "up")

    def _set_up(self) -> None:
        _ip("netns", "add", self._name)
        _ip("link", "add", self._ours, "type", "veth", "peer", "name", self._theirs, "netns", self._name)
        if self._switch is None:
            _ip("addr", "add", f"{self._our_address}/30", "dev", self._ours)
        else:
            _ip("link", "set", self._ours, "master", self._switch.name)
        _ip("link", "set", self._ours, "up")
        bits = 30 if self._switch is None else 16
        _ip("-n", self._name, "addr", "add", f"{self.address}/{bits}", "dev", self._theirs)
        _ip("-n", self._name, "link", "set", "lo", "up")
        self.plug()
        if self._mb_per_s:
            limit = ["rate", f"{self._mb_per_s * 8:g}mbit", "burst", "256kb", "latency", "50ms"]
            command = ["tc", "-n", self._name, "qdisc", "add", "dev", self._theirs, "root", "tbf", *limit]
            subprocess.run(command, check=True, capture_output=True)

    def _tear_down(self) -> None:
        subprocess.run(["ip", "link", "del", self._ours], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self._name], check=False, capture_output=True)


def is_possible() -> bool:
    try:
        with SecondHost():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _next_network(address: str, number: int) -> str:
    """The same place in the network that lies so many beyond."""
    first, second, third, fourth = address.split(".")
    return f"{first}.{second}.{int(third) + number}.{fourth}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
