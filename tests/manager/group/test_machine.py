"""One replica group's manager: as text, what follows from each event (group_script.py says how)."""

from pathlib import Path

from lighthouse_protocol.messages.membership import Participant, World
from lighthouse_protocol.messages.session import (
    STARTING,
    GroupCounts,
    GroupReport,
    Heartbeat,
    Hello,
    JoinAccepted,
    JoinRequest,
    QuorumChanged,
)
from lighthouse_protocol.rules.quorum_change import NamedQuorum, change_between
from manager.group.events import QuorumAnswered, Sent, SessionClosed, SessionOpened, WatchOpened
from manager.group.machine import SECRETS_KEPT, GroupMachine
from tests.manager.builders import ask
from tests.manager.group.group_script import play
from tests.manager.groups import LEASE_UNTIL, done, formed, joined, past, told, unwatched, vote
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
        gone, late = (
            "ranks 6-7 of 8 of a, not connected yet",
            "ranks 2-5 of 8 of a, connected, but without a request for a quorum",
        )
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


def test_a_peer_is_known_by_the_secrets_of_the_last_quorums():
    m = joined(1)
    last = SECRETS_KEPT + 1
    for quorum_id in range(1, last + 1):
        m.handle(told(JoinAccepted(quorum_id, formed(quorum_id), False, f"secret {quorum_id}")), 1)
        m.handle(ask(quorum_id + 1, 0, tag_quorum_id=0), 1)
    assert m.secret_of(1) == ""
    assert [m.secret_of(n) for n in range(2, last + 1)] == [f"secret {n}" for n in range(2, last + 1)]


class TestAQuorumByWhatHasChanged:
    def next_one(self, names: str = "ab") -> tuple[GroupMachine, str, QuorumChanged]:
        """A group that holds quorum 1, has discarded a step, and asks by join 2; the change into 3 of one that
        consists of `names`."""
        m = past()
        for rank in range(2):
            m.handle(ask(3 + rank, rank, 1, tag_quorum_id=1), 1)
        m.handle(vote(60, 0, 1, yes=False), 1)
        for rank in range(2):
            effects = m.handle(ask(5 + rank, rank, 1, tag_quorum_id=1, commit_failures=1), 1)
        [join] = [effect.message for effect in effects if isinstance(effect, Sent)]
        assert isinstance(join, JoinRequest)
        change = change_between(formed(names=names), NamedQuorum.of(formed(3, 1)))
        assert change is not None
        return m, join.holds, QuorumChanged(join.number, change, True)

    def test_its_ranks_are_answered_as_by_the_whole(self):
        m, holds, change = self.next_one()
        assert holds == NamedQuorum.of(formed(1)).digest
        answers = [effect for effect in done(m, told(change), 1) if isinstance(effect, QuorumAnswered)]
        assert [answer.quorum for answer in answers] == [formed(3, 1)] * 2
        assert [answer.assignment.replica_ids for answer in answers] == [("a", "b")] * 2

    def test_of_another_quorum_than_it_holds_they_go_on_waiting_for_the_whole(self):
        m, _, change = self.next_one("bc")
        [sent] = done(m, told(change), 1)
        assert isinstance(sent, Sent)
        assert isinstance(sent.message, JoinRequest)
        assert (sent.message.number, sent.message.holds) == (change.join + 1, "")
        assert done(m, told(change), 1) == [], "the answer to the earlier join is late"
