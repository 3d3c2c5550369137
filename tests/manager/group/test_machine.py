"""One replica group's manager: as text, what follows from each event (group_script.py says how)."""

from pathlib import Path

import pytest

from lighthouse_protocol.messages.membership import Participant, World
from lighthouse_protocol.messages.session import (
    STARTING,
    GroupReport,
    Heartbeat,
    Hello,
    Welcome,
)
from lighthouse_protocol.refusals import InvalidRequest
from manager.group.rules.commit import Voted
from manager.group.rules.events import (
    CallRefused,
    Sent,
    SessionClosed,
    SessionOpened,
    WatchOpened,
)
from manager.group.rules.machine import GroupMachine
from manager.group.rules.status import say_missing
from tests.manager.builders import ask
from tests.manager.group.group_script import play
from tests.manager.groups import (
    LEASE_UNTIL,
    beat,
    committed,
    done,
    echo,
    held,
    holding,
    joined,
    order,
    request,
    told,
    unwatched,
)
from tests.refusals import Refused
from tests.scenarios.paragraphs import scenarios_of


@scenarios_of(Path(__file__).with_name("machine.txt"), play)
def test_what_follows(paragraph: str):
    assert play(paragraph).splitlines() == paragraph.splitlines()


class TestStarting:
    def test_the_hello_says_who_it_is_and_that_its_ranks_have_not_come(self):
        me = Participant("a", address="a:1", group_world_size=2)
        m = GroupMachine(me, "life")
        levels = GroupReport(down=STARTING, missing=frozenset({0, 1}))
        hello = Hello(Participant("a", "life.0", address="a:1", group_world_size=2), levels)
        assert done(m, SessionOpened(), 0) == [Sent(hello), Sent(Heartbeat(1, levels))]

    def test_it_says_which_ranks_are_missing(self):
        m = unwatched(size=8)
        assert say_missing(m.me, m.ranks.watches.missing) == "", "none has come"
        for rank in range(4):
            m.handle(WatchOpened(rank + 1, rank, f"w{rank}"), 0)
        assert say_missing(m.me, m.ranks.watches.missing) == "a has ranks 0-3 of 8; missing: 4-7"
        assert m.tick(1) == [beat(2, down=STARTING, missing=range(4, 8))]
        for rank in range(4, 8):
            m.handle(WatchOpened(rank + 1, rank, f"w{rank}"), 1)
        assert say_missing(m.me, m.ranks.watches.missing) == ""
        assert m.report == GroupReport()

    def test_asked_while_the_lighthouse_is_away_it_joins_when_it_is_back(self):
        m = GroupMachine(Participant("a", address="a:1", store_address="a:2"), "L")
        assert done(m, ask(1, 0, deadline_at=30), 0) == []
        assert m.handle(SessionOpened(), 4)[2:] == [request(m, 1, 26)]

    def test_an_echo_says_it_as_well_as_an_order(self):
        m = holding(1)
        assert done(m, echo(2, order("recalled")), 0.1) == [beat(3, held("recalled", 0))]
        m.handle(SessionClosed(), 1)
        m.handle(SessionOpened(), 2)
        m.handle(told(Welcome(1.0, 5.0, order("resumed", upto=3))), 2)
        assert m.held == held("resumed", 0)


class TestARankThatTheGroupDoesNotHave:
    @pytest.mark.parametrize("group_rank", [-1, 2])
    def test_its_request_and_its_vote_are_refused_and_change_nothing(self, group_rank: int):
        """Also while a quorum stands, of which any rank's request is granted."""
        m = holding(2)
        before = m.status()
        refused = Refused((CallRefused,), 9, InvalidRequest, (f"rank: is {group_rank};", "ranks 0 to 1"))
        asked = [ask(9, group_rank, 0), ask(9, group_rank, 7)]
        voted = [Voted(9, group_rank, 0, vote, quorum_id) for vote in (True, False) for quorum_id in (1, None)]
        for event in (*asked, *voted):
            assert done(m, event, 0.1) == [refused]
        assert m.status() == before


class TestWaitingFor:
    """What ranks that have asked for a quorum wait for."""

    def test_ranks_that_are_not_here_and_ranks_that_do_not_ask(self):
        m = unwatched(size=8)
        for rank in range(6):
            m.handle(WatchOpened(rank + 1, rank, f"w{rank}"), 0)
        m.handle(ask(1, 0), 0)
        m.handle(ask(2, 1), 0)
        gone, late = "ranks 6-7 of 8 of a, not here yet", "ranks 2-5 of 8 of a, here and not asking"
        assert m.status().waiting_for("") == f"{gone}; {late}"
        assert (
            m.status().waiting_for("nothing listens there") == f"{gone}; {late}; the lighthouse: nothing listens there"
        )

    def test_what_the_lighthouse_says_until_its_session_ends(self):
        m = joined()
        assert m.status().waiting_for("") == "the lighthouse to answer"
        m.handle(told(World(2, 1, waiting_for="2 more replica groups")), 1)
        assert m.status().waiting_for("") == "2 more replica groups"
        m.handle(SessionClosed(), 2)
        assert m.status().waiting_for("it is unreachable") == "the lighthouse: it is unreachable"
        assert m.status().waiting_for("") == "the lighthouse to answer"

    def test_the_lease(self):
        m = holding()
        committed(m, 0, LEASE_UNTIL)
        m.handle(ask(3, 0, 1, tag_quorum_id=1), LEASE_UNTIL)
        assert m.status().waiting_for("it is unreachable") == "the lighthouse: it is unreachable"
