"""From one standing quorum to the next: when it is recalled, who is taken into the change, and when it may form."""

from dataclasses import replace

import pytest

from lighthouse.job.events import QuorumFormed, Withdrawn
from lighthouse.job.records import Verdict
from tests.lighthouse.builders import ticked
from tests.lighthouse.sessions import (
    asks,
    connected,
    ended,
    held,
    left,
    lose,
    native,
    opened,
    pulse,
    pulsing,
    recalled,
    resumed,
    standing,
    told,
)

HOLDS = {"held": held(1)}


def past(name: str, step: int = 5, **fields: object):
    """A member of quorum 1 that is past its last step asks for the next quorum."""
    return native(name, step, seen_quorum_id=1, tag_quorum_id=1, **fields)


def names_of(effects: list[object]) -> list[str]:
    return ["".join(p.replica_id for p in e.quorum.participants) for e in effects if isinstance(e, QuorumFormed)]


class TestNewcomer:
    @pytest.mark.parametrize("config", [{"active": 2}, {"allowed_sizes": frozenset({2, 4}), "min_replicas": 2}])
    def test_for_whom_there_is_no_place_recalls_nothing(self, config: dict[str, object]):
        """Forming with those who wait would give the same list."""
        m = standing("ab", **config)
        m.handle(opened(3, "x"), 1)
        assert m.handle(asks(3, 3, "x"), 1) == []
        assert m.decision.verdict is Verdict.FORMED
        assert pulsing(m, {1: HOLDS, 2: HOLDS, 3: {}}, 1, 100) == []

    def test_a_second_one_makes_an_allowed_size(self):
        m = standing("ab", allowed_sizes=frozenset({2, 4}), min_replicas=2)
        for session, name in ((3, "x"), (4, "y")):
            m.handle(opened(session, name), 1)
        assert m.handle(asks(3, 3, "x"), 1) == []
        assert m.handle(asks(4, 4, "y"), 1) == [told("recalled", (1, 2), "2 waiting")]

    def test_waits_while_a_member_asks_for_no_newcomers_at_each_step(self):
        m = connected("ab")
        m.handle(asks(1, 1, "a", shrink_only=True), 0)
        [formed] = m.handle(asks(2, 2, "b"), 0)
        assert not formed.stands, "else nobody would hear its wish"
        m.handle(opened(3, "x"), 1)
        assert m.handle(asks(3, 3, "x"), 1) == []
        m.handle(asks(4, 1, native("a", 1, shrink_only=True)), 2)
        assert names_of(m.handle(asks(5, 2, native("b", 1)), 2)) == ["ab"]

    def test_that_goes_again_leaves_the_recall_behind(self):
        """Whoever has stopped granting must be let on; it costs one change and no step."""
        m = recalled("ab")
        m.handle(Withdrawn("x", 9), 0.5)
        for n in (1, 2):
            m.handle(pulse(n, held=held(1, "recalled", 4)), 1)
        m.handle(asks(10, 1, past("a")), 2)
        m.handle(ended(9), 2)
        assert names_of(m.handle(asks(11, 2, past("b")), 2)) == ["ab"]


class TestLeasesOfTheLost:
    """Quorum 1 of a and b, whose connections have ended, one after the other; they may go on by their leases."""

    def test_a_call_that_would_end_is_not_answered_before_they_are_over(self):
        m = standing("ab")
        for session, name in ((3, "x"), (4, "y"), (5, "z")):
            m.handle(opened(session, name), 0)
        for session in (1, 2):
            lose(m, session, 1)
        for session, name in ((3, "x"), (4, "y")):
            assert m.handle(replace(asks(session, session, name), deadline_at=3), 1) == []
        assert ticked(m, 1, 2.5) == []
        assert m.decision.verdict is not Verdict.READY


class TestLongSteps:
    def test_join_timeout_is_counted_from_a_recalled_members_join(self):
        m = resumed("ab", join_timeout_s=60)
        levels = {n: {"held": held(1, "resumed", 4)} for n in (1, 2)} | {9: {}}
        assert pulsing(m, levels, 1, 100) == []
        m.handle(asks(10, 1, past("a")), 100)
        assert pulsing(m, levels, 100, 159) == []
        assert names_of(pulsing(m, levels, 159, 161)) == ["ax"]


class TestWhenItMayForm:
    def test_a_lease_is_as_long_as_configured_whatever_the_timeout(self):
        m = standing("a", lease_s=20, heartbeat_timeout_s=5)
        m.handle(opened(3, "x"), 0)
        m.handle(ended(1), 1)
        m.handle(asks(3, 3, "x"), 1)
        assert pulsing(m, {3: {}}, 1, 19.9) == []
        assert names_of(pulsing(m, {3: {}}, 19.9, 20)) == ["x"]

    def test_a_lease_from_before_the_quorum_counts_too(self):
        """The manager's newest echoed beat may be older than the quorum that it was handed then."""
        m = connected("ab")
        m.handle(opened(3, "x"), 0)
        for n in (1, 2):
            m.handle(pulse(n), 2)
        m.handle(ended(3), 2)
        for n, name in enumerate("ab", start=1):
            m.handle(asks(n, n, name), 2.5)
        m.handle(opened(3, "x"), 2.6)
        for n in (1, 2):
            lose(m, n, 2.6)
        assert m.standing.leases_free_at() == 7
        m.handle(asks(3, 3, "x"), 2.6)
        assert pulsing(m, {3: {}}, 2.6, 6.9) == []
        assert names_of(pulsing(m, {3: {}}, 6.9, 7.1)) == ["x"]

    def test_also_where_its_ranks_restarted_meanwhile(self):
        """The lease is the manager's, and lives on in its next incarnation."""
        m = connected("a")
        m.handle(pulse(1), 3)
        m.handle(asks(1, 1, "a", incarnation="i2"), 3.5)
        assert m.standing.leases_free_at() == 8
        m.handle(opened(2, "x"), 3.6)
        m.handle(ended(1), 3.6)
        assert m.handle(asks(2, 2, "x"), 3.6) == []


class TestDrain:
    def test_two_that_drain_are_one_change(self):
        m = standing("abc")
        m.handle(pulse(2, drains=True, held=held(1, granted=7)), 1)
        m.handle(pulse(3, drains=True, held=held(1, granted=7)), 1)
        for n in (1, 2, 3):
            m.handle(pulse(n, drains=n > 1, held=held(1, "recalled", 7)), 1)
        for n in (2, 3):
            m.handle(left(n), 2)
        assert names_of(m.handle(asks(10, 1, past("a", 8)), 2)) == ["a"]
