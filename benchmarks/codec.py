"""What it takes to write and to read a message, beside the wires that were written by hand, in turn, in one process.

The hand-written wires are those of commit 3a05025:

    git archive 3a05025 protos | tar -x -C FOLDER
    python -m benchmarks.codec --base FOLDER
"""

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from google.protobuf import descriptor_pool, timestamp_pb2

from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.figures import Spread, json_option, ratios, show_machine, spread, table, write_json
from lighthouse_protocol.limits import MIN_SECRET_CHARS
from lighthouse_protocol.messages import membership, progress, session
from lighthouse_protocol.wire import streams

CALLS = 500
LIMIT = 1.05
RENAMED = {  # since the base
    "Decision": "Vote",
    "GroupReport": "Levels",
    "Heartbeat": "Beat",
    "HeartbeatAck": "Echo",
    "HeldQuorum": "Held",
    "HoldState": "HoldMode",
    "JoinAccepted": "Handed",
    "ProgressSample": "Sample",
    "Vote": "Ballot",
    "VoteAnswer": "Counted",
}

Act = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Cost:
    """`ratio` of ours to the base's; None: there is no base."""

    what: str
    us: Spread
    base_us: Spread | None = None
    ratio: Spread | None = None


def messages(of: Callable[[str], Any]) -> dict[str, tuple[str, Any]]:
    """The stream, and a message as it is in training. `of` finds a class."""
    sample = of("ProgressSample")(
        step=812,
        phases=(of("OpenPhase")("step", 0, None, 0.01), of("OpenPhase")("validation", 3, 25, 0.5)),
        entered=(of("PhaseCount")("step", 1), of("PhaseCount")("validation", 1)),
        collective=of("Collective")(17, 24, "all_reduce", "4096x1024"),
        still_s=0.1,
        times=(of("PhaseTime")("step", 800, 40.0, 0.1),) * 4,
    )
    ranks = (of("RankView")(of("RankName")("group-1", n), sample, 60.0, 0.2, "worker", "host", 77) for n in range(8))
    view = of("GroupView")("group-1", "0f3a", tuple(ranks))
    participant = of("Participant")(
        "group-1", "0f3a", address="10.0.0.7:29512", store_address="10.0.0.7:29600", step=812, group_world_size=8
    )
    assignment = of("Assignment")(
        17, 1, 3, ("group-0", "group-1", "group-2"), "10.0.0.7:29600", 812, 1, 3, 3, "10.0.0.6:29512", place=1
    )
    report = of("GroupReport")(of("HeldQuorum")(17, of("HoldState").STANDING, 812))
    quorum = of("Quorum")(17, (participant,) * 3)
    return {
        "vote": ("to manager", of("Vote")(7, 812, True, 17, True, 59.5)),
        "its answer, with the next grant": ("to rank", of("VoteAnswer")(7, of("Decision")(True, assignment))),
        "rank sample": ("to manager", sample),
        "revoked": ("to rank", of("Revoked")(17, "lost group-2", "group-2")),
        "heartbeat": ("to lighthouse", of("Heartbeat")(5, report)),
        "heartbeat with 8 ranks": ("to lighthouse", of("Heartbeat")(5, report, view)),
        "its answer": ("from lighthouse", of("HeartbeatAck")(5, 1.0)),
        "join": ("to lighthouse", of("JoinRequest")(3, participant, 59.5)),
        "its answer, 3 groups": ("from lighthouse", of("JoinAccepted")(3, quorum, True)),
        "world": ("from lighthouse", of("World")(24, 3)),
    }


def ours() -> dict[str, tuple[Act, Act]]:
    """How each message is written, and read."""
    joined = partial(session.JoinAccepted, secret="s" * MIN_SECRET_CHARS)  # the base has no secrets
    known = vars(membership) | vars(progress) | vars(session) | {"JoinAccepted": joined}
    of_stream = {
        "to manager": streams.WATCH_REQUESTS,
        "to rank": streams.WATCH_RESPONSES,
        "to lighthouse": streams.SESSION_REQUESTS,
        "from lighthouse": streams.SESSION_RESPONSES,
    }
    wires = {name: (stream.write, stream.read) for name, stream in of_stream.items()}
    return {what: acts(message, *wires[stream]) for what, (stream, message) in messages(known.__getitem__).items()}


def theirs(folder: Path) -> dict[str, tuple[Act, Act]]:
    """Of the commit in `folder`. Its descriptors have the names of ours, and get a pool of their own."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    default, descriptor_pool.Default = descriptor_pool.Default, lambda: pool
    sys.path.insert(0, str(folder))
    try:
        told = [importlib.import_module(f"protos.{name}") for name in ("membership", "progress", "session")]
        watch, join = (importlib.import_module(f"protos.{name}") for name in ("watch_wire", "session_wire"))
    finally:
        sys.path.remove(str(folder))
        descriptor_pool.Default = default
    known = {"PhaseCount": lambda *pair: pair} | {name: cls for module in told for name, cls in vars(module).items()}
    wires = {
        "to manager": (watch.watch_request_to_wire, watch.word_from_wire),
        "to rank": (watch.watch_response_to_wire, watch.watch_response_from_wire),
        "to lighthouse": (join.session_request_to_wire, join.session_request_from_wire),
        "from lighthouse": (join.session_response_to_wire, join.session_response_from_wire),
    }
    found = messages(lambda name: known[RENAMED.get(name, name)])
    return {what: acts(message, *wires[stream]) for what, (stream, message) in found.items()}


def acts(message: Any, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> tuple[Act, Act]:
    """From the message to its bytes, and back."""
    schema, body = type(write(message)), write(message).SerializeToString()
    assert read(schema.FromString(body)) == message
    return lambda: write(message).SerializeToString(), lambda: read(schema.FromString(body))


def measure(base: Path | None, blocks: int) -> list[Cost]:
    """Each message in turn, ours and the base's, `blocks` times, after one turn that is not counted."""
    mine, other = ours(), theirs(base) if base is not None else {}
    costs: list[Cost] = []
    for what, both in mine.items():
        for at, way in enumerate(("written", "read")):
            times: tuple[list[float], list[float]] = [], []
            sides = [both[at], *([other[what][at]] if other else [])]
            for turn in range(blocks + 1):
                for found, act in zip(times, sides, strict=False):
                    cost_us = _block(act) * 1e6
                    if turn > 0:
                        found.append(cost_us)
            costs.append(_cost(f"{what}, {way}", *times))
    return costs


def _block(act: Act) -> float:
    began_at = time.thread_time()
    for _ in range(CALLS):
        act()
    return (time.thread_time() - began_at) / CALLS


def _cost(what: str, mine: Sequence[float], other: Sequence[float]) -> Cost:
    if not other:
        return Cost(what, spread(mine))
    return Cost(what, spread(mine), spread(other), ratios(mine, other))


def render(costs: Sequence[Cost]) -> str:
    rows = [
        [cost.what, *(each.text() if each else "" for each in (cost.us, cost.base_us, cost.ratio))] for cost in costs
    ]
    return table(["message", "µs, median (least to most)", "by hand", "ratio"], rows)


def bars(costs: Sequence[Cost]) -> list[Bar]:
    return [Bar(cost.what, cost.ratio.median, LIMIT, "of by hand") for cost in costs if cost.ratio is not None]


@click.command()
@click.option("--base", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of commit 3a05025.")
@click.option("--blocks", type=click.IntRange(1), default=60, show_default=True, help="Blocks of 500 calls each.")
@click.option("--quick", is_flag=True, help="Seconds instead of half a minute: 5 blocks.")
@check_option
@json_option
def main(base: Path | None, blocks: int, quick: bool, check: bool, path: Path | None) -> None:
    """What it takes to write and to read the messages that training sends most."""
    found = show_machine()
    costs = measure(base, 5 if quick else blocks)
    click.echo(render(costs))
    write_json(path, {"benchmark": "codec", "machine": found, "calls": CALLS, "costs": costs})
    conclude(bars(costs), is_checked=check)


if __name__ == "__main__":
    main()
