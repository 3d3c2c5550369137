"""The picture of the page in README.md: `python -m tests.lighthouse.dashboard_picture docs/dashboard.png`.

The status is invented. Each text in it is one that the lighthouse prints in such a case.
"""

import asyncio
import dataclasses
import math
import sys
import tempfile
import time
from pathlib import Path

from lighthouse.job.progress import KEPT, Levels, Pace, Samples
from lighthouse_protocol.messages.incident import IncidentKind, IncidentSummary
from lighthouse_protocol.messages.progress import RankPlace, RankState
from lighthouse_protocol.messages.status import (
    JobStatus,
    MemberState,
    MemberStatus,
    TimelineEntry,
    TimelineKind,
)
from tests.chromium import Chromium
from tests.lighthouse.fake_lighthouse import FakeLighthouse
from tests.lighthouse.statuses import job, member, place, status

MOST_BYTES = 200_000
SUSPECT = "c/1 behind in loader 310/625, a/0-1, b/0-1, c/0 waiting in all_reduce"


def group(name: str, host: int, step: int = 4210, **fields: object) -> MemberStatus:
    of = {"step": step, "address": f"http://node{host}:29512", "start": f"{host}e8a41c7{host}", "world_size": 2}
    return dataclasses.replace(member(name), **(of | fields))  # pyright: ignore[reportArgumentType]


def ranks(name: str, host: int) -> list[RankPlace]:
    where = {"host": f"node{host}", "step": 4210}
    waiting = [place(name, n, pid=5120 + n, progress_age_s=74.0 - n / 10, **where) for n in range(2)]
    if name == "c":
        late = {"phase": "loader", "done": 310, "total": 625, "is_inside": False, "limit_s": 60.0}
        waiting[1] = place(name, 1, RankState.BEHIND, pid=5121, progress_age_s=74.2, **where, **late)
    return waiting


def timeline(now: float) -> tuple[TimelineEntry, ...]:
    said = (
        (1700, TimelineKind.JOINED, "abcd", ""),
        (1699, TimelineKind.QUORUM, "abcd", "quorum 57: 4 participants at step 0"),
        (600, TimelineKind.KILLED, "b", "driver update"),
        (599.9, TimelineKind.LOST, "b", "its connection was lost"),
        (599, TimelineKind.QUORUM, "acd", "quorum 58: 3 participants at step 3316"),
        (571, TimelineKind.JOINED, "b", ""),
        (570, TimelineKind.QUORUM, "abcd", "quorum 59: 4 participants at step 3361"),
        (570, TimelineKind.HEALING, "b", "from step 0 to 3361"),
        (565, TimelineKind.HEALED, "b", "at step 3362"),
        (240, TimelineKind.DRAINED, "d", ""),
        (239, TimelineKind.LEFT, "d", ""),
        (239, TimelineKind.QUORUM, "abc", "quorum 60: 3 participants at step 3980"),
        (13, TimelineKind.STALL, "c", f"nothing has moved for 61 s: {SUSPECT}"),
    )
    return tuple(TimelineEntry(now - ago, kind, tuple(names), 0, text) for ago, kind, names, text in said)


def incidents(now: float) -> tuple[IncidentSummary, ...]:
    stall = IncidentSummary("20261122-101501", "llm-7b", IncidentKind.STALL, SUSPECT, ("c/1",), now - 13, 61.0)
    loss = IncidentSummary(
        "20261122-100514", "llm-7b", IncidentKind.LOSS, "b was lost: its connection was lost", ("b",), now - 600, 0.004
    )
    return (
        dataclasses.replace(stall, evidence_s=61.9, acted_s=61.9, action="notify"),
        dataclasses.replace(loss, quorum_s=0.31, quorum_id=58, step_s=0.87, over_s=0.87, back_s=30.0),
    )


def shown(now: float) -> JobStatus:
    idle = {"state": MemberState.IDLE, "is_participant": False, "heartbeat_age_s": 0.2, "address": ""}
    members = group("a", 1), group("b", 2, heartbeat_age_s=0.7), group("c", 3), group("e", 5, 0, **idle)
    return job(
        *members,
        name="llm-7b",
        quorum_id=60,
        explanation="3 of 4 groups",
        ranks=tuple(rank for host, name in enumerate("abc", start=1) for rank in ranks(name, host)),
        stall=SUSPECT,
        stall_s=74.0,
        timeline=timeline(now),
        incidents=incidents(now),
        rounds=4,
        quorums_formed=4,
    )


def pace() -> Pace:
    """What the samples of such a job were, every two seconds, for ten minutes before now."""
    samples, step = Samples(), 4210.0 - 2.7 * (2 * KEPT - 74)
    for ago in range(2 * KEPT, 0, -2):
        training = 3 if 571 < ago < 599 or ago < 239 else 4
        step += 0.0 if ago < 74 else 2 * (2.7 + 0.1 * math.sin(ago / 17))
        goodput = 0.982 - max(0, 74 - ago) / 900
        levels = Levels(min(int(step), 4210), training, training + (ago < 571), round(goodput, 4))
        samples.add_levels(levels, 2.0 * KEPT - ago)
    return samples.pace_of(dataclasses.replace(levels, step=4210), 6, 2.0 * KEPT)


async def draw(path: Path, *, dark: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            FakeLighthouse(status(shown(time.time())), pace={"llm-7b": pace()}) as lighthouse,
            Chromium(Path(folder)) as browser,
        ):
            async with browser.page(lighthouse.url, width=1400, height=850, dark=dark) as page:
                await page.until(
                    "lighthouseFigures.updates > 1 && document.querySelector('td.act button:not([hidden])')"
                )
                await page.picture(path)


if __name__ == "__main__":
    asyncio.run(draw(Path(sys.argv[1]), dark="--dark" in sys.argv))
