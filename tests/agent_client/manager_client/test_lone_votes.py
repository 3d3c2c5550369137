"""A rank that is alone in its group decides by its yes: it tells its manager, and waits for the answer before it asks
for the next quorum, not before it goes on."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent_client.manager_client.client import ManagerConnection
from lighthouse_protocol.messages.membership import Assignment, Decision
from lighthouse_protocol.messages.session import Revoked, Vote, VoteAnswer
from lighthouse_protocol.refusals import LighthouseError, Unreachable, WrongState
from lighthouse_runtime.client.clients import ManagerClient
from tests.agent_client.assignments import assignment
from tests.agent_client.jobs import Job
from tests.agent_client.manager_client.fake_watch import FakeWatch
from tests.processes import PATIENCE_S, eventually

QUORUM = 7
GRANT = assignment(groups=1, quorum_id=QUORUM)


class FakeManager:
    """`watches` are those that were opened, `asked` the steps and tags of the requests for a quorum."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watches: list[FakeWatch] = []
        self.asked: list[tuple[int, int | None]] = []
        self.revoked: list[int | None] = []
        monkeypatch.setattr(ManagerClient, "watch", lambda *_, **__: self._open())
        monkeypatch.setattr(ManagerClient, "quorum", self._answer)
        self.link = ManagerConnection(
            "127.0.0.1:1", 0, "worker", lambda q, _: self.revoked.append(q), returns_within_s=60.0
        )

    def _open(self) -> FakeWatch:
        self.watches.append(FakeWatch())
        return self.watches[-1]

    def _answer(self, group_rank: int, step: int, *_: object, tag_quorum_id: int | None, **__: object) -> Assignment:
        self.asked.append((step, tag_quorum_id))
        return GRANT

    def ask(self, step: int) -> Assignment:
        return self.link.ask(step, "", tag_quorum_id=QUORUM, commit_failures=0, timeout_s=PATIENCE_S)

    def tell(self, step: int) -> Vote:
        self.link.send_yes(step, quorum_id=QUORUM, timeout_s=PATIENCE_S)
        return self.watches[-1].ballot()

    def count(self, ballot: Vote, outcome: Decision | LighthouseError) -> None:
        self.watches[-1].says.put(VoteAnswer(ballot.number, outcome))


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeManager]:
    manager = FakeManager(monkeypatch)
    manager.ask(4)
    yield manager
    manager.link.close()
    assert manager.watches[-1].is_cancelled.is_set()


def beside(act: Callable[[], Any]) -> "queue.SimpleQueue[Any]":
    """What it returns, when it has."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: done.put(act()), daemon=True).start()
    return done


def test_the_next_request_waits_for_its_answer_and_takes_the_grant_that_comes_with_it(manager: FakeManager) -> None:
    ballot = manager.tell(4)
    assert (ballot.step, ballot.should_commit, ballot.quorum_id, ballot.wants_next) == (4, True, QUORUM, True)
    answer = beside(lambda: manager.ask(5))
    with pytest.raises(queue.Empty):
        answer.get(timeout=0.1)
    manager.count(ballot, Decision(commit=True, next=GRANT))
    assert answer.get(timeout=PATIENCE_S) is GRANT
    assert manager.asked == [(4, QUORUM)]


def test_the_vote_of_a_long_step_asks_for_no_grant_of_the_next(manager: FakeManager) -> None:
    manager.link.asks_ahead = False
    ballot = manager.tell(4)
    assert not ballot.wants_next
    manager.count(ballot, Decision(commit=True))


def test_it_is_repeated_over_the_next_watch_until_it_is_counted(manager: FakeManager) -> None:
    manager.tell(4)
    answer = beside(lambda: manager.ask(5))
    manager.watches[0].says.put(Unreachable("the manager has ended"))
    while len(manager.watches) < 2:
        threading.Event().wait(0.01)
    repeated = manager.watches[1].ballot()
    assert (repeated.step, repeated.should_commit, repeated.quorum_id) == (4, True, QUORUM)
    assert answer.empty()
    manager.count(repeated, Decision(commit=True, next=GRANT))
    assert answer.get(timeout=PATIENCE_S) is GRANT


@pytest.mark.parametrize(
    "outcome", [Decision(commit=True), Decision(commit=False), WrongState("step: the step in flight is 9")]
)
def test_without_a_grant_the_next_quorum_is_asked_for_and_the_state_has_its_tag(
    manager: FakeManager, outcome: Decision | LighthouseError
) -> None:
    """It had taken this rank for lost, or another worker has come: the decision stands, and the next join tells."""
    manager.count(manager.tell(4), outcome)
    manager.ask(5)
    assert manager.asked == [(4, QUORUM), (5, QUORUM)]


def test_a_revoke_while_it_is_under_way_is_known_when_its_grant_is_taken(manager: FakeManager) -> None:
    ballot = manager.tell(4)
    manager.watches[-1].says.put(Revoked(QUORUM, "b is lost"))
    manager.count(ballot, Decision(commit=True, next=GRANT))
    assert manager.ask(5) is GRANT
    assert manager.link.watch.revoked(QUORUM) == "b is lost"
    assert manager.revoked == [QUORUM]


def test_it_is_counted_before_the_link_is_closed(manager: FakeManager) -> None:
    ballot = manager.tell(4)
    closed = beside(manager.link.close)
    assert not manager.watches[-1].is_cancelled.wait(0.1)
    manager.count(ballot, Decision(commit=True))
    closed.get(timeout=PATIENCE_S)


def test_a_step_is_over_while_the_manager_stands_still(job: Job) -> None:
    [a] = job.groups("a")
    for step in (1, 2, 3):
        a.call("ask")
        job.managers["a"].stop()
        done = a.call("step")
        assert (done["committed"], done["step"]) == (True, step)
        next_quorum = a.begin("ask")
        assert not next_quorum.is_done(within_s=0.1)
        job.managers["a"].resume()
        next_quorum.result()
        assert a.call("step", error="a no is no decision of its own")["committed"] is False
    assert "manager" not in job.log("a"), "whatever was told was counted"


def test_the_next_watch_opens_after_the_quorums_of_the_one_before_are_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the revocation, which names no quorum, would abort that of the next watch."""
    manager, may_revoke = FakeManager(monkeypatch), threading.Event()
    manager.link.watch._on_revoked = lambda quorum_id, _: (
        may_revoke.wait(PATIENCE_S),
        manager.revoked.append(quorum_id),
    )
    manager.ask(4)
    manager.watches[0].end()
    eventually(lambda: not manager.link.watch.is_open, "the watch has ended")
    answer = beside(lambda: (manager.ask(4), list(manager.revoked)))
    with pytest.raises(queue.Empty):
        answer.get(timeout=0.2)
    assert len(manager.watches) == 1
    may_revoke.set()
    assert answer.get(timeout=PATIENCE_S) == (GRANT, [None])
    assert len(manager.watches) == 2
    manager.link.close()
