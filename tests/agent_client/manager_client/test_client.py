"""The watch reports where a rank is, and how its manager ends."""

import pytest

from agent_client.errors import GroupDrained
from agent_client.manager_client.client import ManagerConnection
from agent_client.manager_client.watch import SAMPLED_EVERY_S, RankWatch
from agent_client.progress.progress import Progress
from lighthouse_protocol.limits import MAX_REQUEST_BYTES
from lighthouse_protocol.messages.incident import EvidenceAsked, SelfReport
from lighthouse_protocol.messages.membership import Assignment
from lighthouse_protocol.messages.progress import STEP, ProgressSample
from lighthouse_protocol.messages.session import Revoked
from lighthouse_protocol.refusals import Drained, LighthouseError, Unreachable
from lighthouse_runtime.client.clients import ManagerClient
from tests.agent_client.manager_client.fake_watch import FakeWatch
from tests.processes import PATIENCE_S, eventually


def watched(
    monkeypatch: pytest.MonkeyPatch, refusal: LighthouseError, error: type[Exception], progress: Progress | None = None
) -> tuple[ManagerConnection, FakeWatch]:
    """After a first request for a quorum, which is refused."""
    watch = FakeWatch()

    def refuse(*_: object, **__: object) -> Assignment:
        raise refusal

    monkeypatch.setattr(ManagerClient, "watch", lambda *_, **__: watch)
    monkeypatch.setattr(ManagerClient, "quorum", refuse)
    link = ManagerConnection("127.0.0.1:1", 0, "worker", lambda *_: None, returns_within_s=0.0, progress=progress)
    with pytest.raises(error):
        link.ask(0, "", tag_quorum_id=None, commit_failures=0, timeout_s=PATIENCE_S)
    return link, watch


@pytest.mark.parametrize(
    ("refusal", "error", "said"),
    [
        (Drained("a leaves"), GroupDrained, ("INFO", "the manager left with its group: cancelled")),
        (Unreachable("gone"), Unreachable, ("WARNING", "lost the manager: cancelled")),
    ],
)
def test_the_end_of_a_manager_that_has_left_with_its_group_is_no_loss(
    refusal: LighthouseError,
    error: type[Exception],
    said: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO")
    monkeypatch.setattr(RankWatch, "wait_drained", lambda *_: None)
    link, watch = watched(monkeypatch, refusal, error)
    watch.cancel()  # the manager ends
    eventually(lambda: said[1] in caplog.text, "a line on its end")
    told = [(record.levelname, record.message) for record in caplog.records]
    assert told[-1:] == [said]
    assert told[:-1] == ([("WARNING", "this rank stops training: a leaves")] if error is GroupDrained else [])
    link.close()


@pytest.mark.parametrize("progress", [Progress(), None])
def test_a_rank_that_is_asked_what_it_does_says_first_where_it_is(
    monkeypatch: pytest.MonkeyPatch, progress: Progress | None
) -> None:
    """What is done about it is decided by that, and a sample is due twice a second only."""
    link, watch = watched(monkeypatch, Unreachable("no quorum here"), Unreachable, progress)
    watch.says.put(EvidenceAsked(7))
    reports = [watch.reports.get(timeout=PATIENCE_S) for _ in range(1 if progress is None else 2)]
    assert [type(report) for report in reports] == [ProgressSample, SelfReport][-len(reports) :]
    link.close()


def test_a_watch_that_fails_ends_for_this_rank_too_and_the_next_call_opens_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that no longer listened would miss each revocation and answer, and its manager would see it alive."""
    watches = [FakeWatch(), FakeWatch()]
    monkeypatch.setattr(ManagerClient, "watch", lambda *_, **__: watches[0])
    aborts: list[int | None] = []

    def abort(quorum_id: int | None, reason: str) -> None:
        aborts.append(quorum_id)
        if quorum_id is not None:
            raise RuntimeError("NCCL cannot be aborted")

    link = ManagerConnection("127.0.0.1:1", 0, "worker", abort, returns_within_s=0.0)
    link.ensure_watched()
    answer = link.watch.send_vote(3, True, 5, wants_next=False, limit_s=PATIENCE_S)
    failed = watches[0]
    failed.says.put(Revoked(5, "b is lost"))
    with pytest.raises(Unreachable, match="the watch has failed: NCCL cannot be aborted"):
        answer.result(PATIENCE_S)
    assert failed.is_cancelled.wait(PATIENCE_S)
    eventually(lambda: aborts == [5, None], "all else is aborted")
    assert "the watch of this rank failed" in caplog.text
    del watches[0]
    link.ensure_watched()
    assert link.watch.is_open
    link.close()


def test_the_manager_receives_samples_again_and_again_and_a_defect_here_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress()
    link, watch = watched(monkeypatch, Unreachable("no quorum here"), Unreachable, progress)
    link.close()
    [(say, every_s)] = watch.repeated
    assert every_s == SAMPLED_EVERY_S
    progress.step(7)
    with progress.phase("validation", total=3):
        told = say()
    assert told is not None
    assert (told.step, [phase.name for phase in told.phases]) == (7, [STEP, "validation"])
    monkeypatch.setattr(progress, "sample", lambda: 1 / 0)
    assert say() is None
    assert "cannot report the progress of this rank" in caplog.text


@pytest.mark.parametrize(
    "text", ["bad sample caf\udce9.jpg", "Missing key(s): " + "layer, " * 100_000], ids=["bytes", "long"]
)
def test_the_reason_of_an_exit_can_be_sent_whatever_the_exception_says(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(ManagerClient, "invoke", lambda _, rpc: sent.append(rpc.request.SerializeToString()))
    link = ManagerConnection("127.0.0.1:1", 0, "worker", lambda *_: None, returns_within_s=0.0)
    link.report(f"ValueError: {text}")
    [request] = sent
    assert b"ValueError: " in request
    assert len(request) < MAX_REQUEST_BYTES
    link.close()
