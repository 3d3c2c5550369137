"""Statuses to show."""

import dataclasses

from lighthouse_protocol.messages.progress import RankPlace, RankState
from lighthouse_protocol.messages.run import RankStatus, RunCounters, RunStatus, RunTerms
from lighthouse_protocol.messages.status import (
    HealStatus,
    JobStatus,
    LighthouseStatus,
    MemberState,
    MemberStatus,
)


def member(replica_id: str, state: MemberState = MemberState.PARTICIPANT, **fields: object) -> MemberStatus:
    made = MemberStatus(
        replica_id=replica_id,
        start="3f2b8c1e",
        state=state,
        is_participant=True,
        step=7,
        world_size=8,
        heartbeat_age_s=0.4,
        commit_failures=0,
        address="http://host:29512",
        store_address="host:29600",
    )
    return dataclasses.replace(made, **fields)  # pyright: ignore[reportArgumentType]


def job(*members: MemberStatus, name: str = "default", **fields: object) -> JobStatus:
    made = JobStatus(
        job=name,
        quorum_id=42,
        quorum_age_s=193.2,
        verdict="formed",
        explanation="all train",
        quorums_formed=3,
        rounds=1234,
        members=members,
        phase="standing",
        sessions=len(members),
        recalls=5,
        revokes=6,
    )
    return dataclasses.replace(made, **fields)  # pyright: ignore[reportArgumentType]


def place(name: str, number: int, state: RankState = RankState.WAITING, **fields: object) -> RankPlace:
    of = RankPlace(name, number, state, 7, "step", 0, None, 1.0, "all_reduce", True, "", 0.4, 63.0, 60.0, "host", 4711)
    return dataclasses.replace(of, **fields)  # pyright: ignore[reportArgumentType]


def healing(replica_id: str, *, source: str = "a", seconds: float = 12.0) -> MemberStatus:
    """1.2 of 4.0 GiB."""
    text = f"healing from {source}: 1.2 of 4.0 GiB, 98 MiB/s, 29 s left"
    heal = HealStatus(source, 17, 1_288_490_189, 4 * 2**30, seconds, 98 * 2**20, 29.3, 0.4, text)
    return member(replica_id, MemberState.HEALING, heal=heal)


def many(count: int) -> list[MemberStatus]:
    return [member(f"group{number}") for number in range(count)]


def run_of(*states: str, number: int = 3) -> RunStatus:
    """A slot for each state; those that are active come first."""
    ranks = tuple(
        RankStatus(slot, f"i{slot}", state, slot, number, 7, "running", 0.4, 0, "host", 4711 + slot)
        if state == "active"
        else RankStatus(slot, f"i{slot}", state, None, None, 0, "", 0.4, 0, "host", 4711 + slot)
        for slot, state in enumerate(states)
    )
    active, counters = tuple(range(states.count("active"))), RunCounters(number, 0, 2, 2)
    return RunStatus("default", "r", "stands", counters, RunTerms(9), active, False, None, ranks, (), ())


def status(*jobs: JobStatus, runs: tuple[RunStatus, ...] = ()) -> LighthouseStatus:
    return LighthouseStatus(version="0.1.0", uptime_s=4000.0, jobs=jobs, runs=runs)
