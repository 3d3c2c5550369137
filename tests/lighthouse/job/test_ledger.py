"""The ledger: every moment of a group has one cause, and the seconds of a line are its interval."""

import json
import random

import pytest

from lighthouse.job.ledger import DOWN_KEPT_S, EVERY_S, MAX_TEXT_CHARS, Cause, Ledger, cause_of
from lighthouse.job.records import Group, Heal, LastAssignment
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.progress import GroupView, ProgressSample, RankName, RankView
from lighthouse_protocol.messages.session import GroupCounts, GroupReport, HeldQuorum, HoldState
from tests.lighthouse.evidence import summary

UNIX_S = 1_700_000_000.0
STANDING = GroupReport(HeldQuorum(1, HoldState.STANDING, 3))
LEAVING = GroupReport(HeldQuorum(1, HoldState.LEAVING, 3))


def group(name: str = "a", host: str = "node-1", **fields: object) -> Group:
    found = Group(name, "i1", 0.0, Participant(name, address=f"{host}:29511", group_world_size=8))
    found.reports.counts = GroupCounts()
    for field, value in fields.items():
        setattr(found, field, value)
    return found


def trains(name: str = "a", **fields: object) -> Group:
    return group(name, is_participant=True, last_assignment=LastAssignment(1, 0, None), **fields)


def see(found: Group, *hosts: str) -> None:
    ranks = [
        RankView(RankName(found.replica_id, i), ProgressSample(), 60.0, host=host, pid=1)
        for i, host in enumerate(hosts)
    ]
    found.reports.view = GroupView(found.replica_id, "i1", tuple(ranks), group_world_size=len(ranks))


def documents(ledger: Ledger, now: float) -> list[dict]:
    found = [json.loads(line) for line in ledger.take_lines(now, UNIX_S + now)]
    for each in found:
        if "seconds" in each:
            assert sum(each["seconds"].values()) == pytest.approx(each["to"] - each["from"], abs=0.01)
    return found


def seconds(ledger: Ledger, now: float) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in documents(ledger, now):
        for cause, spent_s in each.get("seconds", {}).items():
            total[cause] = total.get(cause, 0.0) + spent_s
    return total


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"is_starting": True, "down": "its ranks are started again"}, Cause.RESTART),
        ({"is_starting": True, "is_alive": False}, Cause.DOWN),
        ({"is_alive": False}, Cause.DOWN),
        ({"down": "rank 0 has ended", "is_participant": True}, Cause.DOWN),
        ({"is_participant": True}, Cause.WAIT),
        ({"is_participant": True, "heal": Heal(5, catches_up=False)}, Cause.HEAL),
        ({}, Cause.RESTART),
        ({"call": 3}, Cause.IDLE),
        ({"last_assignment": LastAssignment(1, 0, None)}, Cause.IDLE),
    ],
)
def test_a_state_has_one_cause(fields, cause):
    assert cause_of(group(**fields)) is cause


def test_time_in_a_quorum_is_computing_where_the_manager_does_not_count():
    found = trains()
    found.reports.counts = None
    assert cause_of(found) is Cause.COMPUTE


def test_counters_divide_the_time_in_a_quorum():
    ledger, found = Ledger(), trains()
    ledger.observe_group("j", found, 0.0)
    ledger.add_report("j", found, STANDING, GroupCounts(3, step_s=70.0, discarded_s=10.0), 95.0)
    assert seconds(ledger, 100.0) == {"compute": 70.0, "repeated": 10.0, "wait": 20.0}
    assert seconds(ledger, 150.0) == {"wait": 50.0}


def test_a_long_step_counts_where_it_ends_and_no_line_has_more_than_its_time():
    ledger, found = Ledger(), trains()
    ledger.observe_group("j", found, 0.0)
    assert seconds(ledger, 100.0) == {"wait": 100.0}
    ledger.add_report("j", found, STANDING, GroupCounts(1, step_s=150.0), 150.0)
    assert seconds(ledger, 160.0) == {"compute": 60.0}
    assert seconds(ledger, 300.0) == {"compute": 90.0, "wait": 50.0}
    ledger.add_report("j", found, STANDING, GroupCounts(1, step_s=9999.0), 300.0)
    assert seconds(ledger, 301.0) == {"compute": 1.0}
    assert seconds(ledger, 1000.0) == {"compute": EVERY_S, "wait": 699.0 - EVERY_S}


def test_a_lost_group_is_down_since_its_last_heartbeat():
    ledger, found = Ledger(), trains()
    ledger.observe_group("j", found, 0.0)
    found.is_alive = False
    ledger.observe_group("j", found, 10.0, 6.0)
    assert seconds(ledger, 20.0) == {"wait": 6.0, "down": 14.0}
    other = trains("b")
    ledger.observe_group("j", other, 20.0)
    documents(ledger, 25.0)
    other.is_alive = False
    ledger.observe_group("j", other, 30.0, 6.0)  # what is written stays
    assert seconds(ledger, 40.0) == {"down": 30.0}  # 15 s of each


def test_a_group_that_stays_away_is_dropped_and_counts_again_when_it_returns():
    ledger, found = Ledger(), trains(is_alive=False)
    ledger.observe_group("j", found, 0.0)
    for now in (DOWN_KEPT_S, DOWN_KEPT_S + 1):
        assert seconds(ledger, now)
    assert seconds(ledger, DOWN_KEPT_S + 2) == {}
    found.is_alive = True
    ledger.observe_group("j", found, DOWN_KEPT_S + 10)
    assert seconds(ledger, DOWN_KEPT_S + 12) == {"wait": 2.0}


def test_the_time_of_a_group_that_leaves_ends():
    ledger, found = Ledger(), trains()
    ledger.observe_group("j", found, 0.0)
    ledger.add_report("j", found, LEAVING, GroupCounts(), 7.0)
    ledger.add_report("j", found, LEAVING, GroupCounts(), 8.0)
    assert seconds(ledger, 20.0) == {"wait": 7.0}
    other = group("b")
    ledger.observe_group("j", other, 20.0)
    ledger.end_group("j", "b", 24.0)
    ledger.end_group("j", "unknown", 24.0)
    assert seconds(ledger, 30.0) == {"idle": 4.0}


def test_groups_known_by_heartbeats_alone_have_no_time():
    ledger = Ledger()
    ledger.observe_group("j", Group("a", "i1", 0.0), 0.0)
    ledger.observe_group("j", None, 0.0)
    assert documents(ledger, 10.0) == []


def test_steps_that_a_job_had_committed_before_are_repeated():
    ledger, found = Ledger(), trains(step=11)
    ledger.observe_group("j", found, 0.0)
    ledger.add_quorum("j", 10)
    ledger.add_report("j", found, STANDING, GroupCounts(1, step_s=10.0), 10.0)  # of step 10
    ledger.add_quorum("j", 10)  # the same again, after a loss
    ledger.add_report("j", found, STANDING, GroupCounts(1, step_s=5.0), 15.0)
    assert seconds(ledger, 15.0) == {"compute": 15.0}
    ledger.add_quorum("j", 4)  # a checkpoint
    found.step = 10
    ledger.add_report("j", found, STANDING, GroupCounts(6, step_s=60.0), 75.0)
    found.step = 11
    ledger.add_report("j", found, STANDING, GroupCounts(1, step_s=25.0), 100.0)
    assert seconds(ledger, 100.0) == {"repeated": 60.0, "compute": 25.0}


def test_a_new_run_with_the_name_of_one_that_has_ended_repeats_nothing():
    ledger, found = Ledger(), trains(step=11)
    ledger.observe_group("j", found, 0.0)
    ledger.add_report("j", found, STANDING, GroupCounts(1, step_s=10.0), 10.0)
    ledger.end_group("j", "a", 10.0)
    again = trains("b", step=1)
    ledger.observe_group("j", again, 20.0)
    ledger.add_quorum("j", 0)
    ledger.add_report("j", again, STANDING, GroupCounts(1, step_s=5.0), 25.0)
    assert seconds(ledger, 25.0) == {"compute": 15.0}


def test_the_time_of_a_lost_group_ends_with_its_job():
    ledger, found, lost = Ledger(), trains(step=11), trains("b")
    for each in (found, lost):
        ledger.observe_group("j", each, 0.0)
        ledger.observe_group("other", each, 0.0)
    ledger.add_report("j", found, STANDING, GroupCounts(1, step_s=10.0), 10.0)
    lost.is_alive = False
    ledger.observe_group("j", lost, 10.0)
    ledger.end_job("j", 15.0)
    ledger.add_report("j", found, LEAVING, GroupCounts(), 16.0)
    ledger.end_group("other", "a", 20.0)
    assert seconds(ledger, 20.0) == {"compute": 10.0, "wait": 56.0, "down": 5.0}
    again = trains("a", step=1)
    ledger.observe_group("j", again, 30.0)
    ledger.add_quorum("j", 0)
    ledger.add_report("j", again, STANDING, GroupCounts(1, step_s=5.0), 35.0)
    assert seconds(ledger, 35.0)["compute"] == 5.0, "another run repeats nothing"


def test_the_first_start_is_not_the_cost_of_a_failure():
    ledger, found = Ledger(), group(is_starting=True)
    ledger.observe_group("j", found, 0.0)
    found.is_starting, found.is_participant = False, True
    ledger.observe_group("j", found, 10.0)
    found.is_starting = True
    ledger.observe_group("j", found, 15.0)
    assert seconds(ledger, 18.0) == {"idle": 10.0, "wait": 5.0, "restart": 3.0}


def test_a_line_names_the_hosts_of_its_time():
    ledger, found = Ledger(), trains()
    ledger.observe_group("j", found, 0.0)
    see(found, "node-1")
    ledger.observe_group("j", found, 5.0)  # its first report tells where it was before, too
    see(found, "node-7", "node-8", "node-7")
    found.is_alive = False
    ledger.observe_group("j", found, 10.0)  # lost: it keeps its host
    found.is_alive, found.is_participant = True, False
    ledger.observe_group("j", found, 30.0)
    lines = documents(ledger, 50.0)
    assert [(each["hosts"], each["from"] - UNIX_S, each["to"] - UNIX_S) for each in lines] == [
        (["node-1"], 0.0, 30.0),
        (["node-7", "node-8"], 30.0, 50.0),
    ]
    assert {each["ranks"] for each in lines} == {8}


def test_a_fault_is_written_once_per_change():
    ledger = Ledger()
    ledger.add_incident(summary(kind=IncidentKind.LOSS, text="x" * 999))
    ledger.add_incident(summary(kind=IncidentKind.LOSS, text="x" * 999, step_s=3.0))
    ledger.add_incident(summary("i2", kind=IncidentKind.NONFINITE))  # interrupts nothing
    (line,) = documents(ledger, 1.0)
    assert (line["job"], line["fault"]["step_s"], len(line["fault"]["text"])) == ("default", 3.0, MAX_TEXT_CHARS)
    assert documents(ledger, 2.0) == []


@pytest.mark.parametrize("seed", range(50))
def test_drawn_histories_add_up(seed):
    r = random.Random(seed)
    ledger, groups = Ledger(), [group(f"g{i}", call=r.choice([None, 1])) for i in range(r.randint(1, 5))]
    now, met, total = 0.0, dict[str, float](), 0.0
    for _ in range(300):
        now += r.expovariate(1.0)
        found = r.choice(groups)
        found.is_alive, found.is_participant = r.random() < 0.8, r.random() < 0.6
        found.is_starting, found.down = r.random() < 0.2, r.choice(["", "rank 0 has ended"])
        found.heal = r.choice([None, Heal(1, catches_up=False)])
        if r.random() < 0.3:
            see(found, *r.choices(["n1", "n2", "n3"], k=2))
        met.setdefault(found.replica_id, now)
        match r.randrange(4):
            case 0:
                ledger.observe_group("j", found, now, now - r.random() * 5)
            case 1:
                spent = GroupCounts(1, step_s=r.random() * 3, discarded_s=r.random())
                ledger.add_report("j", found, STANDING, spent, now)
            case 2:
                ledger.add_quorum("j", r.randrange(5))
                ledger.observe_group("j", found, now)
            case 3:
                ledger.observe_group("j", found, now)
        if r.random() < 0.05:
            total += sum(seconds(ledger, now).values())
    total += sum(seconds(ledger, now).values())
    assert total == pytest.approx(sum(now - at for at in met.values()), rel=0.001)
