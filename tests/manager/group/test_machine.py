"""One replica group's manager: as text, what follows from each event (group_script.py says how)."""

from pathlib import Path

from lighthouse_protocol.messages.membership import Participant, World
from lighthouse_protocol.messages.session import STARTING, GroupCounts, GroupReport, Heartbeat, Hello
from manager.group.rules.events import Sent, SessionClosed, SessionOpened, WatchOpened
from manager.group.rules.machine import GroupMachine
from tests.manager.builders import ask
from tests.manager.group.group_script import play
from tests.manager.groups import LEASE_UNTIL, done, joined, past, told, unwatched
from tests.scenarios.paragraphs import scenarios_of


@scenarios_of(Path(__file__).with_name("machine.txt"), play)
def test_what_follows(paragraph: str):
    assert play(paragraph).splitlines() == paragraph.splitlines()


def test_the_hello_says_who_it_is_and_that_its_ranks_have_not_come():
    m = GroupMachine(Participant("a", address="a:1", group_world_size=2), "life")
    levels = GroupReport(down=STARTING, missing=frozenset({0, 1}), counts=GroupCounts())
    hello = Hello(Participant("a", "life.0", address="a:1", group_world_size=2), levels)
    assert done(m, SessionOpened(), 0) == [Sent(hello), Sent(Heartbeat(1, levels))]


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
        m = past()
        m.handle(ask(3, 0, 1, tag_quorum_id=1), LEASE_UNTIL)
        assert m.status().waiting_for("it is unreachable") == "the lighthouse: it is unreachable"
