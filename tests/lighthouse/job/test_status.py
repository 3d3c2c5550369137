"""The one snapshot, and the verdict in words."""

from collections.abc import Callable

import pytest

from lighthouse.job.events import RankReported
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import Verdict
from lighthouse.job.status import NAMES_SHOWN, awaited, explain, job_status, run_ranks, run_status
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import RankHeartbeat
from lighthouse_protocol.messages.session import RESTARTING, STARTING
from lighthouse_protocol.messages.status import JobStatus, MemberState, MemberStatus
from lighthouse_protocol.rules.access import short_name
from tests.lighthouse.builders import beat, beating, group, join, machine, training
from tests.lighthouse.run_stage import RunStage
from tests.lighthouse.sessions import asks, connected, ended, held, left, native, opened, pulse, standing

START = short_name("i1")


def states(m: QuorumMachine, now: float) -> dict[str, str]:
    return {member.replica_id: member.state.value for member in job_status("j", m, now).members}


def test_of_nothing():
    assert job_status("j", machine(), 5) == JobStatus(
        "j", 0, 0.0, "no_joins", "waiting for a replica group to join; 0 alive", 0, 0, ()
    )


def test_of_a_quorum_at_work():
    m = training("ba", now=1)
    m.handle(join(3, "b", step=1, group_world_size=1, commit_failures=2), now=3)
    a = MemberStatus("a", START, MemberState.STRAGGLER, True, 0, 1, 3.0, 0, "a.example:29512", "a.example:29600")
    b = MemberStatus("b", START, MemberState.JOINED, True, 1, 1, 0.0, 2, "b.example:29512", "b.example:29600")
    assert job_status("j", m, 4) == JobStatus(
        job="j",
        quorum_id=1,
        quorum_age_s=3.0,
        verdict="waiting_for_stragglers",
        explanation="waiting for a, 59 s more at most; 1 of 2 joined",
        quorums_formed=1,
        rounds=1,
        members=(a, b),
    )


def test_the_age_of_a_quorum_is_that_of_its_id():
    m = training("ab", now=1)
    for call, name in enumerate("ab", start=3):
        m.handle(join(call, name, step=1), now=3)
    assert job_status("j", m, 4).quorum_age_s == 3
    for call, name in enumerate("ab", start=5):
        m.handle(join(call, name, step=1, commit_failures=1), now=7)
    assert job_status("j", m, 9).quorum_age_s == 2


def test_every_state_of_a_member():
    m = training("abc", join_timeout_s=10, heartbeat_timeout_s=5)
    m.handle(beat("z"), now=0)
    assert states(m, 0) == {"a": "participant", "b": "participant", "c": "participant", "z": "idle"}
    m.handle(join(4, "a"), now=1)
    assert states(m, 1) == {"a": "joined", "b": "straggler", "c": "straggler", "z": "straggler"}
    beating(m, "abz", 1, 12)
    assert m.quorum.participants == (group("a"),)
    assert states(m, 12) == {"a": "participant", "b": "timed_out", "c": "expired", "z": "timed_out"}


def test_newcomers_do_not_make_stragglers_of_members_at_work():
    m = training("ab")
    m.handle(join(3, "n"), now=1)
    assert states(m, 1) == {"a": "participant", "b": "participant", "n": "joined"}


def test_a_new_incarnation_is_no_participant():
    m = training("ab")
    m.handle(join(3, "a", incarnation="i2"), now=1)
    assert [member.is_participant for member in job_status("j", m, 1).members] == [False, True]


class TestStarting:
    """A group whose ranks have not come yet, or are started again."""

    def test_it_is_waited_for_by_the_first_quorum_and_named(self):
        m = connected("a", min_replicas=2)
        m.handle(opened(2, "b", down=STARTING, missing=frozenset({0})), 0)
        assert states(m, 0) == {"a": "idle", "b": "starting"}
        assert explain(m, 0) == "waiting for a replica group to join; 2 alive; starting: b"
        m.handle(asks(1, 1, "a"), 1)
        assert states(m, 1) == {"a": "joined", "b": "starting"}
        assert explain(m, 1) == "waiting for replica groups: 1 of at least 2 joined (--min-replicas); starting: b"
        m.handle(pulse(2), 2)
        assert states(m, 2) == {"a": "joined", "b": "straggler"}, "its ranks have come"

    def test_one_that_comes_later_is_starting_until_it_joins(self):
        m = standing("a")
        m.handle(opened(2, "b", down=STARTING, missing=frozenset({0})), 1)
        assert states(m, 1) == {"a": "participant", "b": "starting"}
        assert explain(m, 1) == "1 of 2 groups; starting: b"
        m.handle(pulse(2), 2)
        assert states(m, 2)["b"] == "starting"
        m.handle(asks(9, 2, "b"), 3)
        assert (states(m, 3)["b"], m.job.groups.get("b").is_starting) == ("joined", False)

    def test_one_that_has_lost_a_rank_is_down_until_its_supervisor_starts_it_again(self):
        m = standing("ab")
        m.handle(pulse(2, 1, down="rank 0 has ended", missing=frozenset({0})), 1)
        assert states(m, 1) == {"a": "participant", "b": "down"}
        assert "starting" not in explain(m, 1)
        m.handle(pulse(2, 2, down=RESTARTING, missing=frozenset({0})), 2)
        assert states(m, 2)["b"] == "starting"
        m.handle(pulse(2, 3, down="rank 0 has ended", missing=frozenset({0})), 3)
        assert states(m, 3)["b"] == "down"

    def test_one_that_is_gone_is_not_starting(self):
        m = connected("a")
        m.handle(opened(2, "b", down=STARTING, missing=frozenset({0})), 0)
        m.handle(ended(2), 1)
        assert states(m, 1)["b"] == "expired"
        assert explain(m, 1) == "waiting for a replica group to join; 1 alive"


def asked(m: QuorumMachine, names: str, now: float = 0.0) -> QuorumMachine:
    for call, name in enumerate(names, start=10):
        m.handle(join(call, name), now)
    return m


@pytest.mark.parametrize(
    ("make", "now", "explained", "waited_for"),
    [
        (lambda: training("abc"), 1, "3 of 3 groups", ""),
        (
            lambda: asked(machine(min_replicas=3), "a"),
            1,
            "waiting for replica groups: 1 of at least 3 joined (--min-replicas)",
            "2 more replica groups: at least 3 are needed (--min-replicas), joined: a",
        ),
        (
            lambda: asked(machine(min_replicas=3), "ab"),
            1,
            "waiting for replica groups: 2 of at least 3 joined (--min-replicas)",
            "1 more replica group: at least 3 are needed (--min-replicas), joined: a, b",
        ),
        (
            lambda: asked(machine(allowed_sizes=frozenset({8, 4})), "a"),
            0,
            "waiting for replica groups: 1 joined, allowed sizes are 4, 8",
            "more replica groups: allowed sizes are 4, 8, joined: a",
        ),
        (
            lambda: asked(training("ab"), "n", 1),
            1,
            "waiting for a, b to finish their step; 1 joined",
            "a, b, the members of the quorum, to finish their step",
        ),
        (
            lambda: asked(training("abc", join_timeout_s=60), "b", 2),
            12,
            "waiting for a, c, 50 s more at most; 1 of 3 joined",
            "a, c, at most 60 s (--join-timeout)",
        ),
    ],
)
def test_a_verdict_in_words(make: Callable[[], QuorumMachine], now: float, explained: str, waited_for: str):
    m = make()
    assert (explain(m, now), awaited(m)) == (explained, waited_for)


class TestAwaited:
    """What requests for a quorum wait for: the same words for as long as nothing happens."""

    def test_groups_that_start(self):
        m = machine(min_replicas=2)
        for session, (name, missing) in enumerate({"a": (), "b": (0, 1), "c": (1,)}.items(), start=1):
            of, down = native(name, group_world_size=2), STARTING if missing else ""
            m.handle(opened(session, of, down=down, missing=frozenset(missing)), 0)
        m.handle(asks(1, 1, native("a", group_world_size=2)), 1)
        joined = "1 more replica group: at least 2 are needed (--min-replicas), joined: a"
        assert awaited(m) == f"{joined}; starting: b; c has rank 0 of 2; missing: 1"

    def test_every_verdict_that_is_a_wait_has_words(self):
        for verdict in Verdict:
            m = training("ab")
            m.decision = m.decision._replace(verdict=verdict)
            assert bool(awaited(m)) == (verdict not in (Verdict.NO_JOINS, Verdict.FORMED, Verdict.READY))


class TestExplain:
    """The verdict with its numbers."""

    def test_too_few_to_shrink_to(self):
        """Three have joined, but a member asks to admit no newcomer."""
        m = training("abc", min_replicas=2)
        beating(m, "a", 1, 10)
        for call, name in enumerate("dea", start=4):
            m.handle(join(call, name, shrink_only=name == "a"), now=10)
        assert m.decision.verdict is Verdict.TOO_FEW_PARTICIPANTS
        assert explain(m, 10).startswith("waiting for replica groups: 1 of at least 2 ")

    def test_no_more_names_than_fit(self):
        m = machine()
        for n in range(NAMES_SHOWN + 4):
            m.handle(beat(f"g{n:02}"), now=0)
        m.handle(join(1, "a"), now=0)
        assert "g00, g01, g02, g03, g04, g05, g06, g07 and 4 more, 60 s more at most" in explain(m, 0)


def test_the_step_follows_the_beats_of_a_standing_quorum():
    m = standing("ab")
    m.handle(pulse(1, held=held(1, granted=7)), 1)
    assert {member.replica_id: member.step for member in job_status("j", m, 1).members} == {"a": 7, "b": 0}


def test_sessions_whose_heartbeat_is_overdue_are_named():
    """After one and a half intervals; they are alive until they lapse."""
    m = standing("ab")
    m.handle(pulse(1, 9), now=10.0)
    m.handle(pulse(2, 9), now=10.4)
    assert "heartbeat" not in explain(m, 11.5)
    assert explain(m, 11.6).endswith("no heartbeat in time from a")
    assert explain(m, 12.0).endswith("no heartbeat in time from a, b")
    assert {member.state for member in job_status("j", m, 12.0).members} == {MemberState.PARTICIPANT}


def rank_beat(stage: RunStage, slot: int, step: int, still_s: float = 0.0) -> None:
    sample = ProgressSample(step, still_s=still_s)
    stage.feed(RankReported(stage.workers[slot].rank, RankHeartbeat(step + 100, "running", sample)))


def shown(stage: RunStage) -> list[str]:
    """Slot, state, step, what it waits for; * where it is judged."""
    lines: list[str] = []
    for each in run_ranks(stage.machine, stage.now):
        view = each.view
        state = each.state.value if each.state is not None else "running" if view.is_running else view.sample.waits_for
        lines.append(f"{view.name} {state} {view.sample.step}{' *' if each.is_judged else ''}")
    return lines


def test_says_where_its_ranks_are():
    stage = RunStage(4, active=3)
    stage.start(0, 1, 2, 3)
    for slot in range(3):
        rank_beat(stage, slot, 5)
    assert shown(stage) == ["r/0 running 5 *", "r/1 running 5 *", "r/2 running 5 *", "r/3 spare 0"]
    assert [rank.step for rank in run_status(("j", "r"), stage.machine, stage.now).ranks] == [5, 5, 5, 0]


def test_a_sample_ages_until_the_next_one_however_fresh_the_heartbeats_are():
    stage = RunStage(2)
    stage.start(0, 1)
    rank_beat(stage, 0, 5, still_s=3)
    stage.now += 4
    stage.beat(0)
    said, silent = (each.view for each in run_ranks(stage.machine, stage.now))
    assert (said.beat_age_s, said.progress_age_s) == (4, 7)
    assert (silent.progress_age_s, silent.limit_s) == (4, 600)
    stage.finish(0)
    finished, _ = (each.view for each in run_ranks(stage.machine, stage.now))
    assert (finished.beat_age_s, finished.progress_age_s) == (0, 7)


def test_what_was_said_in_a_generation_is_over_with_it():
    stage = RunStage(3, obedient=False)
    stage.start(0, 1, 2)
    for slot in range(3):
        rank_beat(stage, slot, 5)
    stage.finish(0)
    assert shown(stage)[0] == "r/0 the other ranks to finish 5 *"
    stage.kill(2)
    rank_beat(stage, 1, 6)
    assert shown(stage) == ["r/0 the other ranks to finish 5", "r/1 running 5", "r/2 lost 105"]
    stage.ready(0)
    assert shown(stage)[0] == "r/0 the next generation 5"
    stage.ready(1)
    assert shown(stage) == ["r/0 running 105 *", "r/1 running 106 *", "r/2 lost 105"]


def test_one_that_has_finished_and_ended_is_shown_no_more():
    stage = RunStage(2)
    stage.start(0, 1)
    stage.finish(0)
    stage.kill(0)
    assert [line.split()[0] for line in shown(stage)] == ["r/1"]


def test_a_job_whose_groups_have_all_finished_has_ended():
    m = standing("a")
    assert job_status("j", m, 1).ended_step is None
    m.handle(pulse(1, held=held(1, "leaving", 5)), 1)
    m.handle(left(1), 1)
    assert job_status("j", m, 2).ended_step == 6
    m.handle(opened(2, "a", down=STARTING), 3)
    assert job_status("j", m, 3).ended_step is None, "it starts again"
