"""What one peer may hold and use, and how often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.messages.run import RunTerms
from lighthouse_protocol.refusals import LimitReached
from lighthouse_protocol.rules.rate_limits import (
    Peer,
    PeerLimits,
    PeerTable,
    Rate,
    Resource,
    RestartBudget,
    StreamMeter,
    TokenBucket,
    share_used,
)

SMALL = PeerLimits(
    open=2,
    jobs=Rate(1, 2),
    messages=Rate(1, 5),
    bytes=Rate(10, 100),
    stream_messages=Rate(1, 3),
    stream_bytes=Rate(10, 60),
)


def refusal(take: object, *values: object) -> str:
    with pytest.raises(LimitReached) as refused:
        take(*values)  # type: ignore[operator]
    return str(refused.value)


def test_so_many_calls_and_streams_are_open_at_once():
    peer = Peer("10.0.0.1", SMALL)
    peer.enter()
    peer.enter()
    assert refusal(peer.enter) == (
        "10.0.0.1 has 2 calls and streams open; at most 2 for each peer: close some, or raise --max-open-per-peer"
    )
    peer.leave()
    peer.enter()
    assert peer.open == 2


def test_each_resource_counts_by_itself_and_a_refusal_names_it():
    peer = Peer("10.0.0.1", SMALL)
    for _ in range(2):
        peer.charge(Resource.JOBS, 0.0)
    assert refusal(peer.charge, Resource.JOBS, 0.5) == (
        "new jobs by 10.0.0.1: at most 2 at once and 1 a second are taken; send less, or later"
    )
    peer.charge(Resource.RUNS, 0.5)
    peer.charge(Resource.JOBS, 1.0)
    assert [peer.try_charge(Resource.JOBS, 1.0), peer.try_charge(Resource.JOBS, 2.0)] == [False, True]


@pytest.mark.parametrize("resource", Resource)
def test_every_resource_has_a_rate(resource: Resource):
    assert PeerLimits().rate(resource).at_once >= PeerLimits().rate(resource).per_s > 0


def test_where_more_managers_share_an_address_they_may_send_as_much_more():
    usual, twice = PeerLimits(), PeerLimits.for_open(2 * PeerLimits().open)
    assert PeerLimits.for_open(usual.open) == usual
    assert PeerLimits.for_open(10) == PeerLimits(open=10), "a lower limit of streams is no reason for less of the rest"
    assert (twice.open, twice.reads) == (2 * usual.open, usual.reads)
    assert twice.replica_ids == Rate(100, 10_000)
    assert twice.messages == Rate(8_000, 400_000)
    assert (twice.stream_messages, twice.stream_bytes) == (usual.stream_messages, usual.stream_bytes)


def test_a_stream_may_send_less_than_its_peer():
    peer = Peer("p", SMALL)
    one, other = StreamMeter(peer, SMALL), StreamMeter(peer, SMALL)
    for _ in range(3):
        one.charge(1, 0.0)
    assert refusal(one.charge, 1, 0.0).startswith("messages on one stream by p")
    assert refusal(other.charge, 61, 0.0).startswith("bytes on one stream by p")
    other.charge(60, 0.0)
    assert refusal(StreamMeter(peer, SMALL).charge, 60, 0.0).startswith("bytes sent by p")


def test_peers_that_hold_nothing_make_room_and_no_others():
    table = PeerTable(SMALL, max_peers=2)
    held, used = table.get("held", 0.0), table.get("used", 0.0)
    held.enter()
    used.charge(Resource.JOBS, 0.0)
    assert refusal(table.get, "new", 0.5) == "2 peers are active already; try again later"
    assert table.get("used", 0.5) is used
    assert refusal(table.get, "new", 1.4), "they are looked at once a second"
    assert table.get("new", 1.5) is table.get("new", 1.5)
    assert (table.get("held", 1.5), len(table)) == (held, 2)


def test_the_hosts_of_the_largest_job_leave_room_for_others():
    table = PeerTable(PeerLimits())
    for host in range(10_000):
        table.get(f"10.0.{host // 250}.{host % 250}", 0.0).enter()
    assert table.get("an operator's", 0.0).open == 0


TAKES = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=30)  # after so long, so much


def test_so_much_at_once_and_then_as_time_passes():
    bucket = TokenBucket(per_s=2, at_once=3)
    assert [bucket.try_take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.is_full(10.5)
    assert [bucket.try_take(10.5), bucket.try_take(10.5)] == [True, False]
    assert bucket.is_full(12.0)
    assert not bucket.try_take(1000.0, 3.1), "it never holds more"
    assert bucket.try_take(1000.0, 3.0)


@given(st.floats(0.1, 5), st.floats(1, 10), TAKES)
def test_no_stretch_of_time_gets_more_than_its_share(per_s: float, at_once: float, takes: list[tuple[float, float]]):
    bucket, now = TokenBucket(per_s, at_once), 100.0
    taken: list[tuple[float, float]] = []
    for after, amount in takes:
        now += after
        if bucket.try_take(now, amount):
            taken.append((now, amount))
    for begin in range(len(taken)):
        for end in range(begin, len(taken)):
            total = sum(amount for _, amount in taken[begin : end + 1])
            assert total <= at_once + per_s * (taken[end][0] - taken[begin][0]) + 1e-6


@given(st.floats(0.1, 5), st.floats(1, 10), TAKES)
def test_what_is_refused_takes_nothing(per_s: float, at_once: float, takes: list[tuple[float, float]]):
    one, other, now = TokenBucket(per_s, at_once), TokenBucket(per_s, at_once), 100.0
    for after, amount in takes:
        now += after
        one.try_take(now, at_once + 1)
        assert one.try_take(now, amount) == other.try_take(now, amount)


TERMS = RunTerms(max_restarts=3, restart_window_s=100.0, restart_delay_s=1.0)


@pytest.mark.parametrize(
    ("lasted_s", "has_stepped", "delays"),
    [
        (0.1, False, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (0.1, True, [0.0] * 7),  # it got somewhere
        (10.0, False, [0.0] * 7),
    ],
)
def test_what_gets_nowhere_waits_twice_as_long_each_time(lasted_s: float, has_stepped: bool, delays: list[float]):
    budget = RestartBudget()
    assert [budget.add_failure(TERMS, 0.0, lasted_s=lasted_s, has_stepped=has_stepped) for _ in delays] == delays


def test_one_that_gets_somewhere_begins_the_delays_anew():
    budget = RestartBudget()
    said = [budget.add_failure(TERMS, 0.0, lasted_s=0.0, has_stepped=steps) for steps in (False, False, True, False)]
    assert said == [1.0, 2.0, 0.0, 1.0]


def test_failures_leave_the_window():
    budget = RestartBudget()
    for at in (0.0, 40.0, 80.0, 101.0, 141.0):
        budget.add_failure(TERMS, at, lasted_s=0.0, has_stepped=True)
        assert not budget.why_exhausted(TERMS)
    budget.add_failure(TERMS, 150.0, lasted_s=0.0, has_stepped=True)
    assert budget.why_exhausted(TERMS) == "max_restarts: 3 restarts within 100 s are used up"
    assert RestartBudget(budget.failed_at).why_exhausted(TERMS)  # as another lighthouse reads them


@pytest.mark.parametrize(("most", "failures"), [(0, 1), (1, 2), (20, 21)])
def test_one_more_than_the_budget_is_the_end(most: int, failures: int):
    terms = RunTerms(max_restarts=most)
    budget = RestartBudget()
    for count in range(1, failures + 1):
        assert budget.add_failure(terms, 0.0, lasted_s=0.0, has_stepped=False) == 0.0
        assert bool(budget.why_exhausted(terms)) == (count == failures)


def test_no_budget_keeps_nothing():
    budget = RestartBudget()
    for _ in range(1000):
        budget.add_failure(RunTerms(), 0.0, lasted_s=0.0, has_stepped=False)
    assert (budget.failed_at, budget.why_exhausted(RunTerms())) == ((), "")


def test_how_much_of_a_budget_is_used_falls_as_failures_leave_the_window():
    budget = RestartBudget()
    assert budget.used_share(TERMS, 0.0) == budget.used_share(RunTerms(max_restarts=None), 0.0) == 0.0
    for at in (0.0, 40.0):
        budget.add_failure(TERMS, at, lasted_s=0.0, has_stepped=True)
    assert [round(budget.used_share(TERMS, now), 2) for now in (50.0, 120.0, 200.0)] == [0.67, 0.33, 0.0]


def test_a_budget_of_none_is_used_up_by_the_first_failure():
    assert [share_used(restarts, 0) for restarts in (0, 1)] == [0.0, 1.0]
