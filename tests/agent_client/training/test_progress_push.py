import importlib
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from types import SimpleNamespace
from typing import Any

import pytest

from agent_client.errors import ConfigurationError
from agent_client.step.stop_signals import close_each
from agent_client.training import progress_push
from agent_client.training.progress_push import push_progress
from lighthouse_runtime.web import webhook

DEADLINE_S = 60.0


class Rank:
    """An Agent as its callbacks see it, with a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, group_rank: int = 0, replica_rank: int = 0) -> None:
        self.group_rank, self.quorum_id, self.now, self.step = group_rank, 1, 1000.0, 0
        self.quorum = SimpleNamespace(replica_rank=replica_rank, replica_world_size=3, replica_ids=("a", "b", "c"))
        self.internals = SimpleNamespace(
            machine=SimpleNamespace(ended=0), runner=SimpleNamespace(last=self.quorum), attached=set[Any]()
        )
        self.callbacks: list[Callable[[int], object]] = []
        self.on_commit = self.callbacks.append
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: 5000.0)
        monkeypatch.setattr(progress_push, "time", clock)

    def commit(self, seconds: float = 10.0) -> None:
        self.step, self.now = self.step + 1, self.now + seconds
        self.internals.machine.ended += 1
        for callback in self.callbacks:
            callback(self.step)

    def push(self, to: Any, **options: Any) -> None:
        agent: Any = self
        push_progress(agent, to, **options)

    def join(self) -> None:
        """Wait for the pushes that are running."""
        for callback in self.callbacks:
            push: Any = callback.__self__  # type: ignore[attr-defined]
            if push._push is not None:
                push._push.join(DEADLINE_S)
                assert not push._push.is_alive()


class Receiver(ThreadingTCPServer):
    """Gives `answer` to each request and closes the connection. With None, it never answers."""

    daemon_threads = True

    def __init__(self, answer: bytes | None) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.bodies: queue.Queue[dict[str, Any]] = queue.Queue()
        self.answer, self.has_ended = answer, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/secret%20path"

    def handle_error(self, request: object, client_address: object) -> None:
        """The client was killed."""


class _Request(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        server.bodies.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if server.answer is None:
            server.has_ended.wait()
        else:
            self.wfile.write(server.answer)


@contextmanager
def receiver(answer: bytes | None) -> Iterator[Receiver]:
    with Receiver(answer) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield found
        finally:
            found.has_ended.set()
            found.shutdown()


OK = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"


def test_a_webhook_receives_the_progress_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    with receiver(OK) as hook:
        rank.push(hook.url, every_s=30.0, steps=103)
        for _ in range(3):
            rank.commit()
        rank.join()
        assert hook.bodies.get(timeout=DEADLINE_S) == {
            "replica_id": "a",
            "participants": 3,
            "step": 3,
            "steps_per_s": 0.1,
            "goodput": 1.0,
            "left_s": 1000.0,
            "ends_at_unix_s": 6000.0,
        }
        assert hook.bodies.empty()


def test_the_rate_is_that_since_the_last_push(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, pushed = Rank(monkeypatch), list[dict[str, Any]]()
    rank.push(pushed.append, every_s=20.0)
    for seconds in (10.0, 10.0, 5.0, 5.0, 5.0, 5.0, 1.0):
        rank.commit(seconds)
        rank.join()
    assert [(each["step"], each["steps_per_s"]) for each in pushed] == [(2, 0.1), (6, 0.2)]
    assert all("left_s" not in each for each in pushed)


@pytest.mark.parametrize("place", [{"group_rank": 1}, {"replica_rank": 1}])
def test_only_the_first_participant_pushes(monkeypatch: pytest.MonkeyPatch, place: dict[str, int]) -> None:
    rank, pushed = Rank(monkeypatch, **place), list[dict[str, Any]]()
    rank.push(pushed.append)
    for _ in range(5):
        rank.commit(60.0)
    close_each(rank.internals.attached)
    assert pushed == []
    rank.group_rank = rank.quorum.replica_rank = 0  # the group before it was lost
    rank.commit()
    rank.join()
    assert [each["step"] for each in pushed] == [6]


def test_the_last_values_are_pushed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, pushed = Rank(monkeypatch), list[dict[str, Any]]()
    rank.push(pushed.append, steps=2)
    rank.commit()
    rank.commit()
    assert pushed == []
    close_each(rank.internals.attached)
    assert [(each["step"], each["left_s"]) for each in pushed] == [(2, 0.0)]


def test_a_fallback_begins_the_measurement_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, pushed = Rank(monkeypatch), list[dict[str, Any]]()
    rank.push(pushed.append, every_s=1.0, steps=100)
    for step in (50, 51, 10, 11):
        rank.step = step - 1
        rank.commit()
        rank.join()
    assert [(each["step"], each.get("left_s")) for each in pushed] == [(50, None), (51, 490.0), (10, None), (11, 890.0)]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "status 500"),
        (b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", "status 302"),
        (b"", "ServerDisconnectedError"),
        (b"220 mail server ready\r\n\r\n", "its answer is not HTTP"),
        (None, "did not answer within 0.3 s"),
    ],
)
def test_a_bad_receiver_is_logged_once_and_fails_no_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: bytes | None, error: str
) -> None:
    monkeypatch.setattr(webhook, "ANSWERED_WITHIN_S", 0.3)
    rank = Rank(monkeypatch)
    with receiver(answer) as hook:
        rank.push(hook.url, every_s=10.0)
        for _ in range(3):
            rank.commit()
            rank.join()
        assert hook.bodies.qsize() == 3
    [record] = caplog.records
    assert error in record.getMessage()
    assert "secret" not in record.getMessage()


def test_a_receiver_that_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with receiver(OK) as closed:
        pass
    rank = Rank(monkeypatch)
    rank.push(closed.url, every_s=10.0)
    rank.commit()
    rank.join()
    assert "ClientConnectorError" in caplog.text


def test_steps_go_on_while_a_push_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress_push, "ANSWERED_WITHIN_S", 0.01)
    release, pushed = threading.Event(), list[int]()

    def hang(values: dict[str, Any]) -> None:
        pushed.append(values["step"])
        assert release.wait(DEADLINE_S)

    rank = Rank(monkeypatch)
    rank.push(hang, every_s=10.0)
    for _ in range(4):
        rank.commit()
    close_each(rank.internals.attached)
    assert (pushed, caplog.text) == ([1], "")
    for _ in range(10):
        rank.commit()
    assert caplog.text.count("the last push is still running 60 s after the next one was due") == 1
    release.set()
    rank.join()
    rank.commit()
    rank.join()
    assert pushed == [1, 15]


def test_an_error_of_a_function_is_logged_again_after_a_success(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank, errors = Rank(monkeypatch), [True, True, False, True]

    def send(values: dict[str, Any]) -> str:
        if errors.pop(0):
            raise OSError("disk full")
        return "what it returns is no error"

    rank.push(send, every_s=10.0)
    for _ in range(4):
        rank.commit()
        rank.join()
    assert [record.getMessage().partition("OSError")[2] for record in caplog.records] == [
        ": disk full; training is not affected"
    ] * 2


@pytest.mark.parametrize(
    ("to", "options", "named"),
    [
        ("ftp://h/", {}, "to: 'ftp://h/'"),
        ("", {}, "to: ''"),
        (None, {}, "to: None"),
        ("http://h/", {"every_s": 0.0}, "every_s: 0.0"),
        ("http://h/", {"every_s": float("nan")}, "every_s: nan"),
        ("http://h/", {"steps": 0}, "steps: 0"),
    ],
)
def test_bad_arguments_change_nothing(
    monkeypatch: pytest.MonkeyPatch, to: Any, options: dict[str, Any], named: str
) -> None:
    rank = Rank(monkeypatch)
    with pytest.raises(ConfigurationError, match=named):
        rank.push(to, **options)
    assert rank.callbacks == []


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_library_must_be_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=f"{name} is not installed: pip install {name}"):
        Rank(monkeypatch).push(name)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_a_run_no_step_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.delitem(progress_push.sys.modules, name, raising=False)
    rank = Rank(monkeypatch)
    rank.push(name, every_s=10.0)
    rank.commit()
    rank.commit()
    [record] = caplog.records
    assert "no active run; call" in record.getMessage()


@pytest.mark.filterwarnings("ignore")
def test_wandb_receives_the_values_beside_the_row_of_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wandb = pytest.importorskip("wandb")
    rank = Rank(monkeypatch)
    run = wandb.init(project="p", dir=tmp_path, mode="offline", settings=wandb.Settings(silent=True))
    try:
        rank.push("wandb", every_s=10.0)
        for number in range(3):
            run.log({"loss": 1.0}, step=number)
            rank.commit()
            rank.join()
            run.log({"accuracy": 0.5}, step=number)
        run.log({}, step=3)
        assert (run.summary["lighthouse/step"], run.summary["accuracy"], run.step) == (3, 0.5, 3)
    finally:
        run.finish()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_receives_the_values_in_the_run_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    rank = Rank(monkeypatch)
    with mlflow.start_run() as run:
        rank.push("mlflow", every_s=10.0)
        for _ in range(2):
            rank.commit()
            rank.join()
    assert mlflow.get_run(run.info.run_id).data.metrics["lighthouse/step"] == 2.0
    assert len(mlflow.search_runs()) == 1
