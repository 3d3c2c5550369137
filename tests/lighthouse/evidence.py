"""Incidents and evidence to show."""

import dataclasses

from lighthouse_protocol.messages.incident import Incident, IncidentKind, IncidentSummary, MemberEvidence, RankEvidence

STACKS = """\
Thread 0x00007f1c2dffe700 (most recent call first):
  File "/lib/selectors.py", line 415 in select

Thread 0x00007f1c2d7fe700 (most recent call first):
  File "/job/train.py", line 41 in validate
  File "/job/train.py", line 88 in main
"""
RECORDER = '[{"pg": "17", "seq": 24, "operation": "all_reduce", "sizes": [[4096, 1024]], "state": "scheduled"}]'


def rank(number: int = 0, **fields: object) -> RankEvidence:
    given = RankEvidence(
        number,
        rank_incarnation="w1",
        pid=4711,
        host="node-4",
        stacks=STACKS,
        flight_recorder=RECORDER,
        process="state: S (sleeping)\nwchan: futex_wait_queue",
        output=("step 812", "validating"),
        took_s=0.3,
    )
    return dataclasses.replace(given, **fields)  # pyright: ignore[reportArgumentType]


def member(name: str, **fields: object) -> MemberEvidence:
    group, _, number = name.rpartition("/")
    return MemberEvidence(group, rank(int(number), **fields))


def summary(id: str = "20251122-101501", **fields: object) -> IncidentSummary:
    given = IncidentSummary(
        id,
        "default",
        IncidentKind.STALL,
        "b/1 behind in validation 3/25, a/0, b/0 waiting in all_reduce",
        ("b/1",),
        1_763_806_501.0,
        noticed_s=63.2,
    )
    return dataclasses.replace(given, **fields)  # pyright: ignore[reportArgumentType]


def incident(id: str = "20251122-101501", *evidence: MemberEvidence, **fields: object) -> Incident:
    return Incident(summary(id, **fields), evidence)
