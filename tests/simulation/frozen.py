"""What all processes send to each other in the run of a seed, as a digest: the oracle of a refactoring.

    python -m tests.simulation --seeds 0:700 --jobs 2 --compare      # compare with the frozen digests
    python -m tests.simulation --seeds 0:700 --jobs 2 --freeze       # freeze
    python -m tests.simulation runs --seed 17 --messages             # print what is sent

A change that is meant to send something else freezes again, and its commit says what differs and why.
"""

import hashlib
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from tests.simulation.simulators import run_guarded
from tests.simulation.world import Result, World

FOLDER = Path(__file__).with_name("frozen")
DIGITS = 8
SEEDS_PER_LINE = 20
# Fields that the digests do not contain: a random one, and those that were added after the last freeze.
LEFT_OUT = {"secret"}

Sent = list[tuple[str, str, str]]
"""The sender, the receiver and the message."""


class Recorded(NamedTuple):
    result: Result
    digest: str


def record(name: str, seed: int) -> Recorded:
    sent, result = messages(name, seed)
    return Recorded(result, digest(sent))


def messages(name: str, seed: int) -> tuple[Sent, Result]:
    """Run a seed and return its messages in their order. A violation is the last of them."""
    sent: Sent = []
    World.on_send = lambda who, to, message: sent.append((who, to, plain(message)))
    try:
        result = run_guarded(name, seed)
    finally:
        World.on_send = None
    return ([*sent, ("", "", result.violation)] if result.violation else sent), result


def plain(message: Any) -> str:
    """Return a message's type and fields as text, without random secrets and without the module of its class."""
    if isinstance(message, Enum):
        return str(message.value)
    if is_dataclass(message) and not isinstance(message, type):
        names = [field.name for field in fields(message) if field.name not in LEFT_OUT]
        told = (f"{name}={plain(getattr(message, name))}" for name in names)
        return f"{type(message).__name__}({', '.join(told)})"
    if isinstance(message, tuple | list):
        return f"[{', '.join(map(plain, message))}]"
    if isinstance(message, set | frozenset):
        return f"{{{', '.join(sorted(map(plain, message)))}}}"
    if isinstance(message, dict):
        return f"{{{', '.join(f'{plain(key)}: {plain(value)}' for key, value in message.items())}}}"
    return f"{type(message).__name__}: {message}" if isinstance(message, BaseException) else repr(message)


def digest(sent: Sent) -> str:
    """Return the digest of each pair's stream. Messages to different peers have no order."""
    streams: dict[tuple[str, str], Any] = {}
    for who, to, message in sent:
        streams.setdefault((who, to), hashlib.sha256()).update(message.encode() + b"\0")
    whole = hashlib.sha256()
    for names in sorted(streams):
        whole.update(f"{names} {streams[names].hexdigest()}".encode())
    return whole.hexdigest()[:DIGITS]


def load(name: str) -> list[str]:
    """Return the frozen digests of a simulator, by seed."""
    return (FOLDER / f"{name}.txt").read_text().split()


def save(name: str, digests: list[str]) -> None:
    lines = (digests[at : at + SEEDS_PER_LINE] for at in range(0, len(digests), SEEDS_PER_LINE))
    (FOLDER / f"{name}.txt").write_text("".join(f"{' '.join(line)}\n" for line in lines))
