"""The watch reports where a rank is, and how its manager ends."""

import queue
from collections.abc import Callable, Iterator

import pytest

from agent_client.errors import GroupDrained
from agent_client.manager_client.client import ManagerConnection
from agent_client.manager_client.watch import SAMPLED_EVERY_S, RankWatch
from agent_client.progress.progress import Progress
from lighthouse_protocol.messages.membership import Assignment
from lighthouse_protocol.messages.progress import STEP, ProgressSample
from lighthouse_protocol.messages.session import FromRank, Leaving, ToRank, WatchOpened
from lighthouse_protocol.refusals import Drained, LighthouseError, Unreachable
from lighthouse_runtime.client.manager import ManagerClient
from tests.processes import PATIENCE_S, eventually


class FakeWatch:
    """Opens, tells, and ends when it is cancelled or released. `repeated` has what is to be sent, and how often."""

    def __init__(self, *tells: ToRank) -> None:
        self._tells = tells
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.repeated: list[tuple[Callable[[], ProgressSample | None], float]] = []

    def send(self, message: FromRank) -> None:
        assert message == Leaving(None)
        self._over.put(None)

    def repeat(self, say: Callable[[], ProgressSample | None], every_s: float) -> None:
        self.repeated.append((say, every_s))

    def end(self) -> None:
        self._over.put(None)

    def cancel(self) -> None:
        self._over.put(None)

    def __iter__(self) -> Iterator[ToRank]:
        yield WatchOpened()
        yield from self._tells
        self._over.get(timeout=PATIENCE_S)
        raise Unreachable("cancelled")


def watched(monkeypatch: pytest.MonkeyPatch, progress: Progress) -> FakeWatch:
    """After a first request for a quorum."""
    watch = FakeWatch()

    def refuse(*_: object, **__: object) -> Assignment:
        raise Unreachable("no quorum here")

    monkeypatch.setattr(ManagerClient, "watch", lambda *_, **__: watch)
    monkeypatch.setattr(ManagerClient, "quorum", refuse)
    link = ManagerConnection("127.0.0.1:1", 0, "worker", lambda *_: None, returns_within_s=0.0, progress=progress)
    with pytest.raises(Unreachable):
        link.ask(0, "", tag_quorum_id=None, commit_failures=0, timeout_s=PATIENCE_S)
    link.close()
    return watch


@pytest.mark.parametrize(
    ("refusal", "error", "said"),
    [
        (Drained("a leaves"), GroupDrained, ("INFO", "the manager has left with its group: cancelled")),
        (Unreachable("gone"), Unreachable, ("WARNING", "the manager is lost: cancelled")),
    ],
)
def test_the_end_of_a_manager_that_has_left_with_its_group_is_no_loss(
    refusal: LighthouseError,
    error: type[Exception],
    said: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    watch = FakeWatch()

    def refuse(*_: object, **__: object) -> Assignment:
        raise refusal

    caplog.set_level("INFO")
    monkeypatch.setattr(ManagerClient, "watch", lambda *_, **__: watch)
    monkeypatch.setattr(ManagerClient, "quorum", refuse)
    monkeypatch.setattr(RankWatch, "wait_ended", lambda *_: watch.cancel())
    link = ManagerConnection("127.0.0.1:1", 0, "worker", lambda *_: None, returns_within_s=0.0)
    with pytest.raises(error):
        link.ask(0, "", tag_quorum_id=None, commit_failures=0, timeout_s=PATIENCE_S)
    watch.cancel()  # the manager ends
    eventually(lambda: caplog.records, "a line on its end")
    assert [(record.levelname, record.message) for record in caplog.records] == [said]
    link.close()


def test_the_manager_receives_samples_again_and_again(monkeypatch: pytest.MonkeyPatch):
    progress = Progress()
    [(say, every_s)] = watched(monkeypatch, progress).repeated
    assert every_s == SAMPLED_EVERY_S
    progress.step(7)
    with progress.phase("validation", total=3):
        told = say()
    assert told is not None
    assert (told.step, [phase.name for phase in told.phases]) == (7, [STEP, "validation"])


def test_a_defect_here_is_logged_and_ends_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    progress = Progress()
    [(say, _)] = watched(monkeypatch, progress).repeated
    monkeypatch.setattr(progress, "sample", lambda: 1 / 0)
    assert say() is None
    assert "where this rank is cannot be told" in caplog.text
