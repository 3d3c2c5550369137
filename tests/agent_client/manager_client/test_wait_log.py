"""A rank's own lines on a wait for a quorum that lasts."""

import re
import threading

import pytest

from agent_client.manager_client.client import ManagerConnection, WaitLog
from lighthouse_protocol.messages.session import Waiting
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError
from lighthouse_protocol.rules import quorum_change
from lighthouse_runtime.client.clients import ManagerClient
from tests.agent_client.manager_client.fake_watch import FakeWatch
from tests.processes import LOCALHOST, PATIENCE_S, eventually


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum_change, "LOGGED_AFTER_S", 0.2)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """All lines; after how long depends on the machine."""
    return [re.sub(r"\b\d+ s\b", "N s", message) for message in caplog.messages]


def asking(monkeypatch: pytest.MonkeyPatch, watch: FakeWatch, caplog: pytest.LogCaptureFixture, line: str) -> None:
    """A request waits until the rank has said that line."""

    def wait(*_: object, **__: object) -> None:
        eventually(lambda: line in said(caplog), f"{line!r} in {caplog.messages}")
        raise DeadlinePassed("no quorum")

    monkeypatch.setattr(ManagerClient, "watch", lambda *_, **__: watch)
    monkeypatch.setattr(ManagerClient, "quorum", wait)
    link = ManagerConnection(f"{LOCALHOST}:1", 3, "worker", lambda *_: None, returns_within_s=0.0)
    with pytest.raises(DeadlinePassed):
        link.ask(7, "", tag_quorum_id=None, commit_failures=0, timeout_s=30.0)
    link.close()


@pytest.mark.usefixtures("soon")
class TestSays:
    def test_what_the_manager_has_told(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
        line = "rank 3, step 7: no quorum for N s: waiting for 2 more replica groups"
        asking(monkeypatch, FakeWatch(Waiting("2 more replica groups")), caplog, line)
        levels = [record.levelname for record in caplog.records]
        assert [level for level, message in zip(levels, said(caplog), strict=True) if message == line] == ["WARNING"]

    def test_that_the_manager_has_told_nothing_yet(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        line = f"rank 3, step 7: no quorum for N s: waiting for the manager at {LOCALHOST}:1 to answer"
        asking(monkeypatch, FakeWatch(), caplog, line)

    def test_that_the_manager_does_not_answer(self, caplog: pytest.LogCaptureFixture):
        """Nobody listens there: the request waits for somebody to come."""
        link = ManagerConnection(f"{LOCALHOST}:1", 0, "worker", lambda *_: None, returns_within_s=0.0)
        with pytest.raises(LighthouseError):
            link.ask(0, "", tag_quorum_id=None, commit_failures=0, timeout_s=3.0)
        link.close()
        why = "waiting for the manager at 127.0.0.1:1, which does not answer"
        cure = "start it, or fix LIGHTHOUSE_MANAGER_ADDRESS"
        assert f"rank 0, step 0: no quorum for N s: {why}: {cure}" in said(caplog)

    def test_once_it_lasts_again_and_not_after_its_end(self, caplog: pytest.LogCaptureFixture):
        waits = WaitLog(0, lambda: "b")
        with caplog.at_level("INFO"):
            for step in (4, 5):
                with waits.waiting(step):
                    eventually(lambda: len(caplog.messages) % 2 == 1, "the line")
        waits.close()
        assert [message.partition(":")[0] for message in caplog.messages] == 2 * ["rank 0, step 4"] + 2 * [
            "rank 0, step 5"
        ]
        assert said(caplog)[1] == "rank 0, step 4: there is a quorum, after N s"


def test_a_round_says_nothing_and_the_thread_ends(caplog: pytest.LogCaptureFixture):
    waits = WaitLog(0, lambda: "b")
    for step in range(100):
        with waits.waiting(step):
            pass
    thread = waits._thread
    waits.close()
    assert thread is not None
    thread.join(PATIENCE_S)
    assert (caplog.messages, thread.is_alive()) == ([], False)


def test_a_thread_that_comes_to_its_wait_after_the_end_does_not_wait():
    waits = WaitLog(0, lambda: "b")
    waits.close()
    thread = threading.Thread(target=waits._run, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
