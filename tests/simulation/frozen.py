"""What all processes send to each other in the run of a seed, as a digest: the oracle of a refactoring.

    python -m tests.simulation.frozen --seeds 0:2000 --jobs 2 --write      # freeze both simulators
    python -m tests.simulation.frozen --seeds 0:2000 --jobs 2              # compare with what was frozen
    python -m tests.simulation.frozen --seed 17 --kind runs                # print what is sent

A change that is meant to send something else freezes again, and its commit says what differs and why.
"""

import argparse
import hashlib
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation.quorums import simulation
from tests.simulation.runs import simulation as runs
from tests.simulation.world import World

KINDS = {"quorums": simulation.run_seed, "runs": runs.run_seed}
FOLDER = Path(__file__).with_name("frozen")
DIGITS = 12

Sent = list[tuple[str, str, str]]
"""From whom, to whom, what."""


def sent_in(kind: str, seed: int) -> Sent:
    """In their order. A violation, or an error of a machine, is the last."""
    sent: Sent = []
    World.on_send = lambda who, to, message: sent.append((who, to, plain(message)))
    try:
        result = KINDS[kind](seed)
        violation = result.violation
    except Exception as error:  # noqa: BLE001  that is how the run ends
        violation = f"{type(error).__name__}: {error}"
    finally:
        World.on_send = None
    return [*sent, ("", "", violation)] if violation else sent


def plain(message: Any) -> str:
    """By its type and its fields, except random secrets; the same wherever its class is defined."""
    if isinstance(message, Enum):
        return str(message.value)
    if is_dataclass(message) and not isinstance(message, type):
        names = [field.name for field in fields(message) if field.name != "secret"]
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
    """Of what each has sent to each other one: messages to different peers have no order."""
    streams: dict[tuple[str, str], Any] = {}
    for who, to, message in sent:
        streams.setdefault((who, to), hashlib.sha256()).update(message.encode() + b"\0")
    whole = hashlib.sha256()
    for names in sorted(streams):
        whole.update(f"{names} {streams[names].hexdigest()}".encode())
    return whole.hexdigest()[:DIGITS]


def digest_of(kind: str, seed: int) -> str:
    return digest(sent_in(kind, seed))


def load(kind: str) -> list[str]:
    """By seed."""
    return (FOLDER / f"{kind}.txt").read_text().split()


def _digests(kind: str, seeds: range, jobs: int) -> Iterator[str]:
    if jobs == 1:
        yield from map(partial(digest_of, kind), seeds)
        return
    with ProcessPoolExecutor(jobs, initializer=logging.disable) as pool:
        yield from pool.map(partial(digest_of, kind), seeds, chunksize=8)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.frozen", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FROM:TO")
    parser.add_argument("--seed", type=int, help="print what is sent in the run of this one")
    parser.add_argument("--kind", choices=KINDS, help="of this simulator; else of both")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="freeze; FROM must be 0")
    options = parser.parse_args()
    logging.disable()
    kinds = [options.kind] if options.kind else list(KINDS)
    if options.seed is not None:
        for kind in kinds:
            for who, to, message in sent_in(kind, options.seed):
                print(f"{who} -> {to}: {message}")
        return 0
    first, last = (int(text) for text in options.seeds.split(":"))
    differ = 0
    for kind in kinds:
        found = list(_digests(kind, range(first, last), options.jobs))
        if options.write:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{kind}.txt").write_text("".join(f"{each}\n" for each in found))
            continue
        wrong = [
            seed
            for seed, (one, other) in enumerate(zip(load(kind)[first:last], found, strict=True), first)
            if one != other
        ]
        differ += len(wrong)
        print(f"{kind}: {len(found)} seeds, {len(wrong)} differ{': ' if wrong else ''}{' '.join(map(str, wrong[:20]))}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
